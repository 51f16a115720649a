"""A logger: every logged number as a line of `numbers.csv` in the run folder."""

from __future__ import annotations

import csv

from paceline.plugins import PointLogger, RunInfo


class CsvLogger(PointLogger):
    """Lines of step, name, value. A resumed run goes on in the same file."""

    def start(self, info: RunInfo) -> None:
        self._path = None if info.folder is None else info.folder / "numbers.csv"

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self._path is None:
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([step, name, value] for name, value in numbers.items())
