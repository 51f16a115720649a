"""Counts, sizes and durations for people: numbers with their nouns, about three digits, in a fitting unit."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any

_IRREGULAR = {
    **{"process": "processes", "batch": "batches", "class": "classes", "entry": "entries"},
    **{"is": "are", "has": "have", "was": "were", "does": "do"},
}
"""Words whose plural is not theirs with an s."""
_SIZES = ("B", "kB", "MB", "GB", "TB")


def plural(number: float, noun: str) -> str:
    """Return a noun for so many of it: `core` for 1, `bad lines` or `values of speaker` for any other number."""
    if number == 1:
        return noun
    noun, of, whom = noun.partition(" of ")
    head, space, last = noun.rpartition(" ")
    return f"{head}{space}{_IRREGULAR.get(last, f'{last}s')}{of}{whom}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 core`, `2 cores`, `1,024 bad lines`."""
    return f"{number:,} {plural(number, noun)}"


def worded(template: str, values: Mapping[str, Any]) -> str:
    """Return a template filled in as by `str.format`; `{number:#core}` is a number with its noun."""
    return _WORDS.vformat(template, (), values)


class _Words(string.Formatter):
    """`str.format` that knows nouns."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("#"):
            return counted(value, format_spec[1:])
        return str(format(value, format_spec))


_WORDS = _Words()


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges: `0-3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def size(num_bytes: float) -> str:
    """Return a size: `0 B`, `512 B`, `31.4 kB`, `1.2 TB`."""
    scaled, unit = float(num_bytes), _SIZES[0]
    for unit in _SIZES:
        # 999.95 would be shown as 1000.0: it is 1.0 of the next unit.
        if scaled < 999.95 or unit == _SIZES[-1]:
            break
        scaled /= 1000
    return f"{scaled:.0f} {unit}" if unit == _SIZES[0] else f"{scaled:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a duration: `0.4 s`, `31.0 s`, `5.2 min`, `960.41 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3597 else f"{seconds / 3600:,.2f} h"
