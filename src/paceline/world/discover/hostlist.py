"""Host names as SLURM writes them, `rack[0-1]n[08-10].ib,login`, and the names that are meant. Pure functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from paceline.core.errors import PacelineError

MOST_HOSTS = 1_000_000
"""More than any cluster has: a longer list is a mistake, and would only fill the memory."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class HostlistUnreadable(PacelineError):
    """Text that is no list of hosts."""

    text: str
    why: str
    sentence = "list of hosts {shown!r}: {why}"
    hint = "a list of hosts reads like `n1,n[2-4],rack[0-1]n[08-10]`; `scontrol show hostnames` writes one out"

    @property
    def shown(self) -> str:
        return self.text if len(self.text) <= 100 else f"{self.text[:100]}..."


def expand(text: str) -> list[str]:
    """Every host of the list, in order, as often as it is named."""
    hosts: list[str] = []
    for item in _items(text):
        for host in _combine(item, text):
            hosts.append(host)
            if len(hosts) > MOST_HOSTS:
                raise HostlistUnreadable(text, f"more than {MOST_HOSTS:,} hosts")
    return hosts


def fold(hosts: Iterable[str]) -> str:
    """Return a short list of hosts, in order: neighbours that differ in their last number share a bracket."""
    parts: list[str] = []
    for (start, width, end), group in itertools.groupby(map(_split_number, hosts), key=lambda split: split[:3]):
        if width is None:
            parts += [start for _ in group]
            continue
        numbers = _ranges([number for *_, number in group], width)
        parts.append(f"{start}{numbers}{end}" if numbers.isdecimal() else f"{start}[{numbers}]{end}")
    return ",".join(parts)


def _items(text: str) -> Iterator[str]:
    """Split a list at commas outside of brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise HostlistUnreadable(text, f"the bracket at character {place + 1} does not fit")
        if letter == "," and depth == 0:
            yield _named(text[start:place], text)
            start = place + 1
    if depth:
        raise HostlistUnreadable(text, "a bracket is not closed")
    yield _named(text[start:], text)


def _named(item: str, text: str) -> str:
    if not item.strip():
        raise HostlistUnreadable(text, "a name is empty")
    return item.strip()


def _combine(item: str, text: str) -> Iterator[str]:
    """Return all hosts of `a[..]b[..]c`; the last bracket counts fastest."""
    pieces = re.split(r"\[([^\]]*)\]", item)
    choices = [_numbers(piece, text) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(bracket: str, text: str) -> list[str]:
    """Return 08, 09, 10, 12 for `08-10,12`: with as many digits as the range's first number."""
    numbers: list[str] = []
    for part in bracket.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise HostlistUnreadable(text, f"{part!r} is no number and no range such as 08-10")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise HostlistUnreadable(text, f"the range {part} goes backwards")
        if last - first >= MOST_HOSTS:
            raise HostlistUnreadable(text, f"more than {MOST_HOSTS:,} hosts")
        numbers += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return numbers


def _split_number(host: str) -> tuple[str, int | None, str, int]:
    """Return prefix, padding (0: not padded; None: no number), suffix and the last number of a name."""
    match = re.fullmatch(r"(.*?)(\d+)(\D*)", host, re.DOTALL | re.ASCII)
    if match is None:
        return host, None, "", 0
    width = len(match[2]) if match[2].startswith("0") else 0
    return match[1], width, match[3], int(match[2])


def _ranges(numbers: list[int], width: int) -> str:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [(f"{first:0{width}}", f"{last:0{width}}") for first, last in runs]
    return ",".join(first if first == last else f"{first}-{last}" for first, last in texts)
