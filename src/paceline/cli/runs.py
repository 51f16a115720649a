"""`paceline runs [DIR]`: what was trained, how far it got and how well."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.cloud.address import Place
from paceline.core.cloud.run_copy import bring_runs
from paceline.core.errors import NotFound
from paceline.core.terminal import emit, tell
from paceline.observe.run_table import read_lines, table

with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class RunsOptions(Section):
        """List the runs in a folder, newest last."""

        folder: Place = Path("runs")
        """Where to look; the folders in it are looked through too."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of a table."""


OPTIONS, POSITIONAL = RunsOptions, ("folder",)


def run(argv: Sequence[str]) -> int:
    options = load(RunsOptions, argv, prog="paceline runs", positional=POSITIONAL)
    bring_runs(options.folder)
    if not options.folder.is_dir():
        is_file = options.folder.exists()
        raise NotFound(
            f"{options.folder} is a file, not a folder of runs" if is_file else f"there is no folder {options.folder}",
            hint="`paceline runs FOLDER` looks elsewhere; runs are made in `runs` unless `--runs-dir` or `--out` say "
            "otherwise",
        )
    lines = read_lines(options.folder)
    if options.json:
        emit(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    elif lines:
        tell(table(lines, _width()))
    else:
        tell(f"no runs in {options.folder}\n")
    return 0


def _width() -> int:
    """Return the columns of the terminal, as `COLUMNS` or it itself says; a pipe has any number, and loses nothing."""
    return shutil.get_terminal_size((sys.maxsize, 24)).columns
