"""`paceline report RUN [RUN...]`: how runs went, as one page that opens anywhere."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.recipes import REPORTS
from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.disk import cannot_write, replacing
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.run_folder import METRICS
from paceline.core.terminal import tell
from paceline.core.units import counted

if TYPE_CHECKING:
    from paceline.observe.report.section import RecipeReport

PAGE = "report.html"


class ReportOptions(Section):
    """Write one HTML page about runs: losses, metrics, time, verdicts, settings and their differences, samples."""

    runs: tuple[Path, ...]
    """Folders of runs."""
    out: Path | None = None
    """The page; `report.html` in the run's folder if not set, in the working folder for several runs."""


OPTIONS, POSITIONAL = ReportOptions, ("runs",)


class NoRunGiven(PacelineError):
    """No run is named."""

    sentence = "a report of which run?"
    hint = "`paceline report runs/NAME`; `paceline runs` lists runs"


def run(argv: Sequence[str]) -> int:
    options = load(ReportOptions, argv, prog="paceline report", positional=POSITIONAL)
    if not options.runs:
        raise NoRunGiven
    path = options.out or (options.runs[0] / PAGE if len(options.runs) == 1 else Path(PAGE))
    tell(f"{write_report(options.runs, path)}\n")
    return 0


def recipe_reports() -> list[RecipeReport]:
    """Import what the recipes add to reports."""
    places = (place.partition(":") for place in REPORTS)
    return [getattr(importlib.import_module(module), name)() for module, _, name in places]


def write_report(folders: Sequence[Path], path: Path) -> str:
    """Make the page; returns the line that says so. It has its name only when it is complete."""
    from paceline.observe.report.page import page
    from paceline.observe.report.runs import read_runs

    runs = read_runs(folders, recipe_reports())
    text = page(runs)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error, len(text.encode()), "it writes the page") from error
    unfinished = [run.name for run in runs if run.status not in ("finished", "early", "stopped")]
    notes = f" ({', '.join(unfinished)}: not finished, shown as far as it came)" if unfinished else ""
    for run in runs:
        if run.num_unread:
            lines = f"{counted(run.num_unread, 'line')} of {near(run.folder / METRICS)}"
            notes += f"; left out, because they cannot be read: {lines}"
    return f"report in {near(path)}, {path.stat().st_size / 1e6:.1f} MB; it opens in any browser, also offline{notes}"
