"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere, one writer on many ranks."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

QUIET_S = 10.0
"""Plain lines come at most this often."""


class Progress:
    """The console of a run; silent on all ranks but the first."""

    def __init__(self, enabled: bool = True) -> None:
        self._console = Console(file=sys.stdout, quiet=not enabled, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._line: int | None = None
        if enabled and self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
        self._told = time.monotonic()
        self._epoch = 0
        self._total: int | None = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"  {name:<{width}}  {value}")

    def epoch(self, epoch: int, total: int | None, done: int) -> None:
        self._epoch, self._total = epoch, total
        if self._bar is not None:
            self._bar.start()  # not before: a run that cannot begin leaves the terminal as it was
            if self._line is not None:
                self._bar.remove_task(self._line)  # type: ignore[arg-type]
            self._line = self._bar.add_task(f"epoch {epoch + 1}", total=total, completed=done, note="")

    def step(self, done: int, loss: float, skipped: int) -> None:
        note = f"loss {loss:.4f}" + (f", {skipped} skipped" if skipped else "")
        if self._bar is not None and self._line is not None:
            self._bar.update(self._line, completed=done, note=note)  # type: ignore[arg-type]
        elif time.monotonic() - self._told >= QUIET_S:
            self._told = time.monotonic()
            self.say(f"epoch {self._epoch + 1}, step {done}/{self._total or '?'}, {note}")

    def epoch_done(self, epoch: int, steps: int, seconds: float, computing: float, loss: float) -> None:
        """RETURNN's epoch line."""
        hours, rest = divmod(int(seconds), 3600)
        clock = f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
        self.say(
            f"train epoch {epoch + 1}, finished after {steps} steps, {clock} elapsed"
            f" ({100 * computing:.1f}% computing time), loss {loss:.4f}"
        )

    def validation(self, metrics: dict[str, float]) -> None:
        self.say("  " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
