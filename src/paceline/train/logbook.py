"""Steps as they are logged: kept on the device, read together, written once."""

from __future__ import annotations

import torch

from paceline.observe.clock import computing_share
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress
from paceline.train.engine import Engine, Step
from paceline.train.position import Position


class Logbook:
    """Between the loop and what is seen of it: `metrics.jsonl` and the console."""

    def __init__(self, journal: Journal, progress: Progress, engine: Engine, position: Position) -> None:
        self._journal, self._progress, self._engine, self._position = journal, progress, engine, position
        self._pending: list[tuple[Step, float | None]] = []
        self.loss = float("nan")
        """Of the last step that was read."""

    def note(self, step: Step) -> None:
        self._pending.append((step, self._engine.rate))

    def flush(self) -> None:
        """Read what the device has counted since the last time, in one go."""
        if not self._pending:
            return
        losses = _read_losses([step for step, _ in self._pending])
        epoch = self._position.epoch
        self._journal.steps(
            (step.number, epoch, loss, rate) for (step, rate), loss in zip(self._pending, losses, strict=True)
        )
        self._pending.clear()
        self.loss = losses[-1]
        skipped = self._engine.skips.read(self._engine.num_steps)
        self._progress.step(self._position.step, self.loss, skipped)

    def validation(self, metrics: dict[str, float]) -> None:
        self.flush()
        record = {"kind": "validation", "step": self._engine.num_steps - 1, "epoch": self._position.epoch}
        self._journal.write([{**record, **metrics}])
        self._progress.validation(metrics)

    def epoch(self, steps: int, seconds: dict[str, float]) -> None:
        self.flush()
        total = sum(seconds.values())
        self._progress.epoch_done(self._position.epoch, steps, total, computing_share(seconds), self.loss)

    def close(self) -> None:
        self.flush()
        self.end()

    def end(self) -> None:
        """Let go of the file and the terminal, also after a failure."""
        self._journal.close()
        self._progress.close()


def _read_losses(steps: list[Step]) -> list[float]:
    """All losses in one transfer."""
    if steps[0].loss_sum.device.type == "cpu":
        return [step.loss for step in steps]
    sums = torch.stack([step.loss_sum.double() for step in steps])
    counts = torch.stack([torch.as_tensor(step.count).to(sums, non_blocking=True) for step in steps])
    return [float(value) for value in (sums / counts).tolist()]
