"""Report of runs, written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.cloud.file_copy import send
from paceline.core.disk import cannot_write, replacing
from paceline.core.paths import near
from paceline.core.run_folder import METRICS
from paceline.core.units import counted
from paceline.observe.report.page import page
from paceline.observe.report.runs import read_runs
from paceline.observe.report.section import recipe_reports

PAGE = "report.html"


def write_report(folders: Sequence[Path], path: Path) -> str:
    """Write the page atomically; return the line that says so."""
    runs = read_runs(folders, recipe_reports())
    text = page(runs)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error, len(text.encode()), "it writes the page") from error
    send(path)
    unfinished = [run.name for run in runs if run.status not in ("finished", "early", "stopped", "diverged")]
    notes = f" ({', '.join(unfinished)}: not finished, shown as far as it came)" if unfinished else ""
    for run in runs:
        if run.num_unread:
            lines = f"{counted(run.num_unread, 'line')} of {near(run.folder / METRICS)}"
            notes += f"; left out, because they cannot be read: {lines}"
    return f"report in {near(path)}, {path.stat().st_size / 1e6:.1f} MB; it opens in any browser, also offline{notes}"
