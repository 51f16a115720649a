"""Console of a run: a bar on a terminal or in a notebook, plain lines elsewhere, one writer."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rich.console import Console

from paceline.core.terminal import visible
from paceline.core.units import plural
from paceline.observe.bars import REFRESH_S, Bar, NotebookBar, TerminalBar, Word, is_notebook
from paceline.observe.rank_log import CONSOLE
from paceline.observe.records import Samples

Style = Literal["bar", "notebook", "lines", "none"]
QUIET_S = 10.0
"""Pause between two plain lines."""
SETUP_QUIET_S = 3.0
"""The same before the first step, where nothing else is to be seen."""

_console_log = logging.getLogger(CONSOLE)
_console_log.propagate = False  # it is on the console already


def choose_style(setting: str, *, is_terminal: bool, is_notebook: bool) -> Style:
    """Return the style for `--progress` and the place that the output goes to."""
    if setting in ("lines", "none"):
        return "lines" if setting == "lines" else "none"
    if is_notebook:
        return "notebook"
    return "bar" if is_terminal or setting == "bar" else "lines"


class Progress:
    """Console of a run; silent on all ranks but the first.

    `say` prints always, `tell` not with `--progress none`. Both write to the rank's log file, too.
    `is_relayed`: a launcher passes the output on, and its terminal is not the user's, who may have sent it to a file.
    """

    def __init__(self, enabled: bool = True, asked: str = "auto", *, is_relayed: bool = False) -> None:
        in_notebook = is_notebook()
        # In a notebook rich would print each line as a block of HTML; its text belongs into the cell's output.
        self._console = Console(
            file=sys.stdout, quiet=not enabled, highlight=False, soft_wrap=True, force_jupyter=False
        )
        style = choose_style(asked, is_terminal=self._console.is_terminal and not is_relayed, is_notebook=in_notebook)
        self._style: Style = style if enabled else "none"
        self._bar: Bar | None = None
        if self._style == "notebook":
            self._bar = NotebookBar()
        elif self._style == "bar":
            self._bar = TerminalBar(self._console)
        self._last_shown = time.monotonic()
        self._title = ""
        self._total: int | None = None
        self._first, self._began = 0, 0.0

    # -- lines ---------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print what a user must know, also with `--progress none`."""
        text = visible(text)
        _console_log.info(text)
        self._console.print(text, markup=False)

    def tell(self, text: str) -> None:
        """Print what a user likes to see."""
        if self._style == "none":
            _console_log.info(visible(text))
        else:
            self.say(text)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Print names and values, one pair a line."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.tell(f"  {name:<{width}}  {value}")

    # -- before the first step -----------------------------------------------------------------------------------

    def countdown(self, title: str) -> Callable[[int, int], None]:
        """Return a function of (done, total) that shows how far a part of the set-up is, and the time that is left.

        The bar is gone when all is done; plain lines come only where that takes long.
        """
        began = shown = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if self._bar is not None and done >= total:
                self._bar.close()
            if self._style == "none" or done >= total:
                return
            note = setup_note(done, total, now - began)
            if self._bar is not None:
                self._bar.show(title, done, total, [Word(note)] if note else [])
            elif now - shown >= SETUP_QUIET_S:
                shown = now
                self.tell(f"  {title}: {done} of {total}{f', {note}' if note else ''}")

        return show

    # -- steps ---------------------------------------------------------------------------------------------------

    def epoch(self, title: str, total: int | None, done: int) -> None:
        """Begin the steps of an epoch, of which `done` have been done before."""
        self._title, self._total, self._first, self._began = title, total, done, time.monotonic()
        if self._bar is not None:
            self._last_shown = self._began
            self._bar.show(title, done, total)

    def step(self, done: int, loss: float, rate: float | None, skipped: int, whole: Whole | None = None) -> None:
        """Show a step; `whole` is how far the run is, where that is known."""
        if self._style == "none":
            return
        now = time.monotonic()
        if now - self._last_shown < (QUIET_S if self._bar is None else REFRESH_S):
            return
        self._last_shown = now
        per_s = (done - self._first) / max(now - self._began, 1e-9)
        words = pace(done, self._total, loss, rate, per_s, skipped, whole)
        if self._bar is not None:
            self._bar.show(self._title, done, self._total, words)
        else:
            note = ", ".join(word.text for word in words)
            self.tell(f"{self._title}, step {done}/{self._total or '?'}, {note}")

    def validation(self, metrics: dict[str, float], samples: Samples | None = None) -> None:
        self.tell("  " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        for line in sample_lines(samples or {}):
            self.tell(line)

    def close(self) -> None:
        """Give the terminal back; what is said afterwards is still printed."""
        if self._bar is not None:
            self._bar.close()


def setup_note(done: int, total: int, elapsed_s: float) -> str:
    """Return the time that is left if the rest takes as long per part as what is done; nothing before that is known."""
    return f"{clock_time(math.ceil(elapsed_s / done * (total - done)))} left" if done > 0 else ""


def sample_lines(samples: Samples, most: int = 2) -> list[str]:
    """Return lines with some samples of each set; the texts of one stand below each other."""
    lines = []
    for of, each in samples.items():
        for sample in each[:most]:
            width = max(len(name) for name in sample)
            lines += [f"    {of}  {name:<{width}}  {text}" for name, text in sample.items()]
    return lines


class Whole(NamedTuple):
    """How far a whole run is."""

    done: float
    """Share of its steps."""
    left_s: float | None = None

    @property
    def phrase(self) -> str:
        """Return the share, and the time that is left where it is known: `12.5% of the run, 1:20:00 left`."""
        return self.share if self.left_s is None else f"{self.share}, {self.left}"

    @property
    def share(self) -> str:
        return f"{math.floor(1000 * min(self.done, 1.0)) / 10:.1f}% of the run"

    @property
    def left(self) -> str:
        return f"{clock_time(self.left_s or 0.0)} left"


def pace(
    done: int,
    total: int | None,
    loss: float,
    rate: float | None,
    per_s: float,
    skipped: int,
    whole: Whole | None = None,
) -> list[Word]:
    """Return loss, rate, speed, and what is left of the run, or else of the epoch."""
    words = [Word(f"loss {loss:.4f}")]
    if rate is not None:
        words.append(Word(f"lr {rate:.3g}", 5))
    words.append(Word(f"{per_s:.3g} it/s" if per_s < 1000 else f"{per_s:.0f} it/s", 4))
    if whole is not None:
        words.append(Word(whole.share, 3))
        if whole.left_s is not None:
            words.append(Word(whole.left, 2))
    elif total is not None and per_s > 0:
        words.append(Word(f"{clock_time((total - done) / per_s)} left in the epoch", 3))
    if skipped:
        words.append(Word(f"{skipped} skipped", 1))
    return words


def clock_time(seconds: float) -> str:
    """Return seconds as h:mm:ss."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def epoch_line(
    title: str,
    steps: int,
    seconds: float,
    computing: float,
    *,
    loss: float,
    padding: float | None,
    speeds: Sequence[str] = (),
    standing: Sequence[str] = (),
) -> str:
    """Return RETURNN's epoch line, with padding, speeds, and where the run stands."""
    parts = [
        f"train {title}",
        f"finished after {steps} {plural(steps, 'step')}",
        f"{clock_time(seconds)} elapsed ({100 * computing:.1f}% computing time)",
        f"loss {loss:.4f}",
    ]
    if padding is not None:
        parts.append(f"padding {100 * padding:.1f}%")
    return ", ".join([*parts, *speeds, *standing])
