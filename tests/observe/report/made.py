"""Runs for reports: made by hand, so that every number on the page is known, or by real training on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.observe.report.runs import ReportedRun, read_run
from paceline.train.loop import train
from paceline.world.link import Link
from tests.observe.report.written import epoch, step, usual, write_run
from tests.train.small import SmallTask, opened

__all__ = ["epoch", "made", "step", "train_on_ranks", "usual", "write_run"]


def made(tmp_path: Path, records: list[dict[str, Any]] | None = None, name: str = "a", **settings: Any) -> ReportedRun:
    """Such a run, as the report reads it."""
    return read_run(write_run(tmp_path / name, usual() if records is None else records, **settings))


def train_on_ranks(link: Link, out: Path) -> None:
    """A real run; `run_ranks` calls it."""
    train(opened(SmallTask(), out, link, epochs=3, grains=2, profile="2:5", progress="none", loggers=()))
