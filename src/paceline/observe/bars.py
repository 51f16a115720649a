"""Progress bars: rich's on a terminal, one line of text that is replaced in place in a notebook."""

from __future__ import annotations

import html
import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

NOTEBOOK_COLUMNS = 100
"""Width of a line that fits into a notebook's cell."""
NOTEBOOK_BAR = 20
REFRESH_S = 0.25
"""Pause between two drawings of a bar: one costs about a millisecond of the time of training."""


class Bar(Protocol):
    """Line that shows how far an epoch is."""

    def show(self, title: str, done: int, total: int | None, note: str) -> None: ...

    def close(self) -> None: ...


class TerminalBar:
    """Bar of rich. It starts with the first `show`: a run that cannot begin leaves the terminal as it was.

    It is drawn by `show`, not by a thread of its own, which would take the interpreter from training; and it vanishes
    at the end, when the epoch lines say all.
    """

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console if console.is_terminal else Console(file=console.file, force_terminal=True),
            auto_refresh=False,
            transient=True,
        )
        self._line: TaskID | None = None

    def show(self, title: str, done: int, total: int | None, note: str) -> None:
        if self._line is None:
            self._bar.start()
            self._line = self._bar.add_task(title, note=note)
        self._bar.update(self._line, description=title, completed=done, total=total, note=note, refresh=True)

    def close(self) -> None:
        if self._line is not None:
            self._bar.remove_task(self._line)
            self._line = None
        self._bar.stop()


class SideBar:
    """Progress of a long command, on stderr beside what is printed; drawn on a terminal only."""

    def __init__(self, title: str, total: int | None = None) -> None:
        self._bar = TerminalBar(Console(stderr=True)) if sys.stderr.isatty() else None
        self._title, self._total, self._next = title, total, 0.0

    def __enter__(self) -> SideBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int | None = None) -> None:
        if self._bar is not None and time.monotonic() >= self._next:
            self._bar.show(self._title, done, total or self._total, "")
            self._next = time.monotonic() + REFRESH_S


class NotebookBar:
    """Line of text in the cell's output, replaced in place. Needs IPython alone, no widgets."""

    def __init__(self) -> None:
        self._display: Any = sys.modules["IPython"].display
        self._handle: Any = None

    def show(self, title: str, done: int, total: int | None, note: str) -> None:
        self._put(notebook_line(title, done, total, note))

    def close(self) -> None:
        """Leave an empty line where the bar was: the epoch lines say all."""
        if self._handle is not None:
            self._put("")
            self._handle = None

    def _put(self, line: str) -> None:
        data = {"text/plain": line, "text/html": f"<pre>{html.escape(line)}</pre>" if line else ""}
        if self._handle is None:
            self._handle = self._display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def notebook_line(title: str, done: int, total: int | None, note: str) -> str:
    """Return the bar as text, never wider than a cell."""
    filled = min(NOTEBOOK_BAR, NOTEBOOK_BAR * done // total) if total else 0
    bar = "█" * filled + "░" * (NOTEBOOK_BAR - filled)
    line = f"{title} {bar} {done}/{total or '?'} {note}".rstrip()
    return line if len(line) <= NOTEBOOK_COLUMNS else line[: NOTEBOOK_COLUMNS - 3] + "..."


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook; a plain IPython terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
