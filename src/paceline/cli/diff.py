"""`paceline diff RUN RUN`: settings, versions, code and command lines that two runs do not share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.cloud.address import Place, shown
from paceline.core.cloud.run_copy import bring_run
from paceline.core.run_folder import BrokenRecord, NotARun, RunFolder, RunRecord, read_record
from paceline.core.secrets import masked_command, masked_values
from paceline.core.terminal import one_line, tell
from paceline.observe.report.runs import NoRun
from paceline.observe.report.settings import ABSENT, OWN_NAMES

Rows = dict[str, tuple[str, str]]


class DiffOptions(Section):
    """Show how two runs differ; the exit code is 0 if they do not, 1 if they do."""

    left: Place
    """Folder of a run, or its address."""
    right: Place
    """Folder of another run, or its address."""


OPTIONS, POSITIONAL = DiffOptions, ("left", "right")


def run(argv: Sequence[str]) -> int:
    options = load(DiffOptions, argv, prog="paceline diff", positional=POSITIONAL)
    changes = differences(_read(options.left), _read(options.right))
    if not changes:
        tell("no difference\n")
        return 0
    _show(changes, shown(options.left), shown(options.right))
    return 1


def differences(left: RunRecord, right: RunRecord) -> dict[str, Rows]:
    """Return the differences between the records of two runs: heading -> name -> both values."""
    sections = {heading: (_values(left, heading), _values(right, heading)) for heading in ("settings", "start")}
    changed = {}
    for heading, (ours, theirs) in sections.items():
        names = [*ours, *(name for name in theirs if name not in ours)]
        rows = {
            name: (ours.get(name, ABSENT), theirs.get(name, ABSENT))
            for name in names
            if ours.get(name, ABSENT) != theirs.get(name, ABSENT)
        }
        if rows:
            changed[heading] = rows
    return changed


def _values(record: RunRecord, heading: str) -> dict[str, str]:
    if heading == "settings":
        settings = {name: value for name, value in masked_values(record.settings).items() if name not in OWN_NAMES}
        return {name: str(value) for name, value in {"task": record.task, **settings, "grains": record.grains}.items()}
    start = (record.starts or [{}])[-1]
    flat = {
        "command": masked_command(start.get("command")),
        "host": start.get("host"),
        **(start.get("versions") or {}),
    }
    git = start.get("git") or {}
    flat |= {"git commit": git.get("commit"), "git dirty": git.get("dirty")}
    return {name: str(value) for name, value in flat.items() if value is not None}


def _read(folder: Path) -> RunRecord:
    bring_run(folder)
    if not RunFolder(folder).is_run:
        raise NoRun(folder)
    try:
        record = read_record(folder)
        record.require("task", "grains")
    except BrokenRecord as error:
        raise NotARun(folder, str(error)) from error
    return record


def _show(changes: dict[str, Rows], left: str, right: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, markup=False)
    for heading, rows in changes.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in (heading, left, right):
            table.add_column(one_line(title), overflow="fold")
        for name, values in rows.items():
            table.add_row(*map(one_line, (name, *values)))
        console.print(table)
