"""The account of a data set that was read: what was kept, what was dropped or skipped, and how many hours that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.core.paths import near
from paceline.core.units import duration
from paceline.data.manifest.bad_line import BadLine, shown


class Amount(NamedTuple):
    """Utterances and how long they are together."""

    number: int = 0
    hours: float = 0.0

    def __str__(self) -> str:
        return f"{self.number:,} ({self.length})"

    @property
    def length(self) -> str:
        return duration(3600 * self.hours)


@dataclass(frozen=True)
class FileReading:
    """What became of the lines of one file."""

    path: Path
    kept: Amount
    too_short: Amount
    too_long: Amount
    num_bad: int

    @property
    def num_lines(self) -> int:
        return self.kept.number + self.too_short.number + self.too_long.number + self.num_bad


@dataclass(frozen=True)
class Reading:
    """What became of the lines of a data set, file by file."""

    files: tuple[FileReading, ...]
    bad: tuple[BadLine, ...]
    """Those that were skipped, up to `manifest.MOST_LISTED`; `num_bad` counts all."""
    min_seconds: float
    max_seconds: float | None

    @property
    def kept(self) -> Amount:
        return _sum(file.kept for file in self.files)

    @property
    def too_short(self) -> Amount:
        return _sum(file.too_short for file in self.files)

    @property
    def too_long(self) -> Amount:
        return _sum(file.too_long for file in self.files)

    @property
    def num_bad(self) -> int:
        return sum(file.num_bad for file in self.files)

    def lines(self) -> list[str]:
        """What a user is told when a run starts."""
        told = [self._words(self.kept, self.too_short, self.too_long, self.num_bad)]
        if len(self.files) > 1:
            told += [
                f"  {near(file.path)}: {self._words(file.kept, file.too_short, file.too_long, file.num_bad)}"
                for file in self.files
            ]
        return told + shown(self.bad, self.num_bad)

    def _words(self, kept: Amount, too_short: Amount, too_long: Amount, num_bad: int) -> str:
        parts = [f"{kept.number:,} utterance{'s' * (kept.number != 1)}, {kept.length}"]
        if too_short.number:
            parts.append(f"dropped {too_short} shorter than {self.min_seconds:g} s")
        if too_long.number:
            parts.append(f"dropped {too_long} longer than {self.max_seconds:g} s")
        if num_bad:
            parts.append(f"skipped {num_bad:,} bad line{'s' * (num_bad != 1)}")
        return ", ".join(parts)


def _sum(amounts: Iterable[Amount]) -> Amount:
    found = list(amounts)
    return Amount(sum(amount.number for amount in found), sum(amount.hours for amount in found))
