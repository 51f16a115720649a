"""Lines of a manifest read again, for keys that are not held in columns, such as `speaker`."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import InvalidData
from paceline.core.json_text import json_text
from paceline.core.paths import near
from paceline.data.packed.errors import is_packed
from paceline.data.packed.reader import open_packed
from paceline.data.strings import Strings
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.lhotse import is_cut, lines_of_cut
from paceline.recipes.speech.manifest.line import AUDIO_KEYS, BOM, parse_object
from paceline.recipes.speech.shards.tar_index import SUFFIX

_IN_COLUMNS = frozenset((*AUDIO_KEYS, "duration", "offset", "text", "text_filepath", "shard_id"))


def raw_lines(manifest: Manifest) -> Iterator[tuple[int, bytes]]:
    """Yield (row, its line read again), file by file in the order of lines."""
    for number, path in enumerate(manifest.sources):
        rows = np.flatnonzero(manifest.source_numbers == number)
        rows = rows[np.argsort(manifest.lines[rows], kind="stable")]
        if is_packed(path):
            packed = open_packed(path)
            yield from ((row, _as_line(manifest, row, packed.extra(manifest.line(row) - 1))) for row in rows.tolist())
            continue
        lines = _lines_of_file(_file_of(path), rows.tolist(), manifest.lines[rows].tolist())
        taken: Counter[tuple[int, int]] = Counter()
        for row, raw in lines:
            yield row, _own_line(manifest, row, path, raw, taken) if b'"supervisions"' in raw else raw


def _file_of(path: Path) -> Path:
    """Return the file of a source's lines; those of a shard are kept in the cache."""
    if path.suffix != SUFFIX:
        return path
    from paceline.recipes.speech.shards.scan import shard_lines  # needs soundfile

    return shard_lines(path)


def _own_line(manifest: Manifest, row: int, path: Path, raw: bytes, taken: Counter[tuple[int, int]]) -> bytes:
    """Return the line of a row that is a cut, or one of the supervisions of a cut.

    Of supervisions that do not differ in place and text, rows get one after the other: `taken` counts them.
    """
    entry = parse_object(raw)
    if not is_cut(entry):
        return raw
    lines = lines_of_cut(entry, path.parent)
    offset, seconds, text = manifest.offset(row), float(manifest.durations[row]), manifest.text(row)
    far = [
        (abs(line["offset"] - offset), abs(line["duration"] - seconds), line.get("text", "") != text) for line in lines
    ]
    alike = [number for number, each in enumerate(far) if each == min(far)]
    group = manifest.line(row), alike[0]
    chosen = alike[taken[group] % len(alike)]
    taken[group] += 1
    return json_text(lines[chosen]).encode()


def extra_keys(manifest: Manifest) -> Strings:
    """Return for each row a JSON object of the keys that are not in columns, empty text if there are none."""
    extras = [b""] * len(manifest)
    is_line = np.ones(len(manifest), bool)
    for number, path in enumerate(manifest.sources):
        if not is_packed(path):
            continue
        is_from_file = manifest.source_numbers == number
        is_line &= ~is_from_file
        if (packed_extras := open_packed(path).extras) is not None:
            for row in np.flatnonzero(is_from_file).tolist():
                extras[row] = packed_extras.raw(manifest.line(row) - 1)
    rows = np.flatnonzero(is_line)
    for index, raw in raw_lines(manifest.take(rows)):
        extra = {key: value for key, value in parse_object(raw).items() if key not in _IN_COLUMNS}
        if extra:
            extras[rows[index]] = json_text(extra).encode()
    return Strings.pack(extras)


def _lines_of_file(path: Path, rows: list[int], numbers: list[int]) -> Iterator[tuple[int, bytes]]:
    """Yield (row, line) for ascending line numbers."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        position, raw = 0, b""
        for row, number in zip(rows, numbers, strict=True):
            while position < number:
                raw = file.readline()
                position += 1
                if not raw:
                    raise InvalidData(
                        f"{near(path)} has been changed since it was read: line {number} is gone",
                        hint="start again, and leave the file alone meanwhile",
                    )
            yield row, raw.removeprefix(BOM) if position == 1 else raw


def _as_line(manifest: Manifest, row: int, extra: dict[str, Any]) -> bytes:
    """Return a line for a row of packed data, which has none."""
    line = {"audio_filepath": manifest.audio_names[row], "duration": float(manifest.durations[row])}
    return json_text({**line, "text": manifest.text(row), **extra}).encode()
