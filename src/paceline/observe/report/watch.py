"""Report of runs that go on: what there is to see of them, and the page of it."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from paceline.core.run_folder import METRICS, RECORD, RUNNING, UNSEEN, BrokenRecord, read_record, status_now
from paceline.observe.report.page import LivePage, page
from paceline.observe.report.runs import EmptyRun, read_runs
from paceline.observe.report.section import RecipeReport
from paceline.observe.report.server import REFRESH_S

_WAITING = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="{refresh_s}">'
    "<title>Paceline report</title>"
    '<p style="font: 1.1rem system-ui, sans-serif; margin: 2rem">{what}</p>'
)


def seen(folders: Sequence[Path]) -> tuple[str, bool]:
    """Return a version of what there is to see, another one when a run has written more, and if more may come."""
    parts: list[str] = []
    is_going_on = False
    for folder in folders:
        try:
            status = status_now(folder, str(read_record(folder).status))
        except (OSError, BrokenRecord):
            status = "unreadable"
        is_going_on = is_going_on or status == RUNNING or status.startswith(UNSEEN)
        parts += [status, _stamp(folder / METRICS), _stamp(folder / RECORD)]
    return xxhash.xxh3_64("\n".join(parts).encode()).hexdigest(), is_going_on


def _stamp(path: Path) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "absent"
    return f"{status.st_size} {status.st_mtime_ns}"


def make_page(folders: Sequence[Path], recipes: Sequence[RecipeReport], version: str) -> str:
    """Return the page of these runs; one without steps yet is waited for."""
    try:
        return page(read_runs(folders, recipes), live=LivePage(version, REFRESH_S))
    except EmptyRun as error:
        return _WAITING.format(refresh_s=REFRESH_S, what=html.escape(f"{error}: {error.hint}"))
