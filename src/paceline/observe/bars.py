"""Progress bars: rich's on a terminal, one line of text that is replaced in place in a notebook."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

NOTEBOOK_COLUMNS = 100
"""Width of a line that fits into a notebook's cell."""
MAX_BAR, MIN_BAR = 20, 8
"""Columns of a bar: as many as there is room for."""
REFRESH_S = 0.25
"""Pause between two drawings of a bar: one costs about a millisecond of the time of training."""


class Word(NamedTuple):
    """Part of what is said beside a bar."""

    text: str
    rank: int = 0
    """Those of the highest rank are left out first where there is not enough room; those of rank 0 never."""


class Layout(NamedTuple):
    """A line of a bar that fits into a width."""

    title: str
    bar_width: int
    note: str


def layout(title: str, counts: str, words: Sequence[Word], width: int) -> Layout:
    """Fit a title, a bar, counts and words, with a space between them, into so many columns.

    The bar becomes shorter, then words are left out, then the title is cut: a bar is seen at any width.
    """
    words = list(words)
    room = width - cell_len(title) - cell_len(counts) - 3
    while room < MIN_BAR + cell_len(_joined(words)) and any(word.rank for word in words):
        words.remove(max(words, key=lambda word: word.rank))
    note = _joined(words)
    if room < MIN_BAR + cell_len(note):
        title = set_cell_size(title, max(0, cell_len(title) + room - MIN_BAR - cell_len(note))).rstrip()
        return Layout(title, MIN_BAR, note)
    return Layout(title, min(MAX_BAR, room - cell_len(note)), note)


def _joined(words: Sequence[Word]) -> str:
    return ", ".join(word.text for word in words)


class Bar(Protocol):
    """Line that shows how far an epoch is."""

    def show(self, title: str, done: int, total: int | None, words: Sequence[Word] = ()) -> None: ...

    def close(self) -> None: ...


class TerminalBar:
    """Bar of rich. It starts with the first `show`: a run that cannot begin leaves the terminal as it was.

    It is drawn by `show`, not by a thread of its own, which would take the interpreter from training; and it vanishes
    at the end, when the epoch lines say all.
    """

    def __init__(self, console: Console) -> None:
        self._column = BarColumn(bar_width=MAX_BAR)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            self._column,
            TextColumn("{task.fields[counts]}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True)),
            console=console if console.is_terminal else Console(file=console.file, force_terminal=True),
            auto_refresh=False,
            transient=True,
        )
        self._line: TaskID | None = None

    def show(self, title: str, done: int, total: int | None, words: Sequence[Word] = ()) -> None:
        counts = f"{done:>{len(str(total))}}/{total}" if total is not None else f"{done}/?"
        line = layout(title, counts, words, self._bar.console.width)
        self._column.bar_width = line.bar_width
        if self._line is None:
            self._bar.start()
            self._line = self._bar.add_task(line.title, counts=counts, note=line.note)
        self._bar.update(
            self._line,
            description=line.title,
            completed=done,
            total=total,
            counts=counts,
            note=line.note,
            refresh=True,
        )

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
            self._bar.show(self._title, done, total or self._total)
            self._next = time.monotonic() + REFRESH_S


class NotebookBar:
    """Line of text in the cell's output, replaced in place. Needs IPython alone, no widgets."""

    def __init__(self) -> None:
        self._display: Any = sys.modules["IPython"].display
        self._handle: Any = None

    def show(self, title: str, done: int, total: int | None, words: Sequence[Word] = ()) -> None:
        self._put(notebook_line(title, done, total, words))

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


def notebook_line(title: str, done: int, total: int | None, words: Sequence[Word] = ()) -> str:
    """Return the bar as text, never wider than a cell."""
    counts = f"{done}/{total or '?'}"
    title, width, note = layout(title, counts, words, NOTEBOOK_COLUMNS)
    filled = min(width, width * done // total) if total else 0
    line = f"{title} {'█' * filled}{'░' * (width - filled)} {counts} {note}".rstrip()
    return line if len(line) <= NOTEBOOK_COLUMNS else line[: NOTEBOOK_COLUMNS - 3] + "..."


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook; a plain IPython terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
