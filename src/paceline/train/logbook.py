"""Steps as they are logged: kept on the device, read together, handed to all who watch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from paceline.data.grain import Batch
from paceline.observe.clock import Clock, computing_share, elapsed
from paceline.observe.progress import Progress, epoch_line
from paceline.observe.watcher import RunInfo, Samples, Watcher
from paceline.train.engine import Engine
from paceline.train.position import Position
from paceline.train.recorded import counters
from paceline.train.step import Step
from paceline.train.summary import DataFacts


class Logbook:
    """Between the loop and what is seen of it: the watchers and the console. Ranks but the first have no watchers."""

    def __init__(
        self,
        watchers: Sequence[Watcher],
        progress: Progress,
        engine: Engine,
        position: Position,
        clock: Clock,
        more: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`more` gives numbers of the last step that are worth a look on the device, when something is logged."""
        self._watchers, self._progress, self._engine, self._position = watchers, progress, engine, position
        self._clock, self._more = clock, more
        self._pending: list[tuple[Step, float | None]] = []
        self._status = "failed"  # until the run is closed
        self._is_over = False
        self._before = clock.read()
        self._losses: list[float] = []
        self._num_samples = 0
        self._skipped = 0
        self._stage: str | None = None
        self._padding: float | None = None
        self.loss = float("nan")
        """Of the last step that was read."""

    def start(self, info: RunInfo) -> None:
        for watcher in self._watchers:
            watcher.start(info)

    def note(self, step: Step, batch: Batch) -> None:
        self._pending.append((step, self._engine.rate))
        for grain in batch.grains:
            self._num_samples += len(grain.samples)

    def flush(self) -> None:
        """Read what the device has counted since the last time, in one go.

        Steps of ranks that step apart (`reduce: param`) are kept until their losses are of all ranks.
        """
        ready = [entry for entry in self._pending if not entry[0].is_local]
        if not ready:
            return
        self._pending = [entry for entry in self._pending if entry[0].is_local]
        losses = _read_losses([step for step, _ in ready])
        skipped = self._engine.skips.read(self._engine.num_steps)
        self._clock.lap("compute")  # what was waited for is the device
        self.loss = losses[-1]
        self._losses += losses
        if self._watchers:
            epoch = self._position.epoch
            records = [
                {"kind": "step", "step": step.number, "epoch": epoch, "loss": loss, "lr": rate, **step.notes}
                for (step, rate), loss in zip(ready, losses, strict=True)
            ]
            records[-1] |= self._more()
            for watcher in self._watchers:
                watcher.step(records)
        self._progress.step(self._position.step, self.loss, self._engine.rate, skipped)
        self._clock.lap("logging")

    def validation(self, metrics: dict[str, float], samples: Samples | None = None) -> None:
        self.flush()
        record = {"kind": "validation", "step": self._engine.num_steps - 1, "epoch": self._position.epoch, **metrics}
        if samples:
            record["samples"] = samples
        for watcher in self._watchers:
            watcher.validation(record)
        self._progress.validation(metrics, samples)

    def begin_epoch(self, data: DataFacts, stage: str | None) -> None:
        """`stage` is named where there are several."""
        self._clock.lap("setup")
        self._before, self._losses, self._num_samples = self._clock.read(), [], 0
        self._skipped = self._engine.skips.state()[0]
        self._stage, self._padding = stage, data.padding
        self._progress.epoch(self._title, data.num_steps, self._position.step)
        self._clock.lap("logging")

    def end_epoch(self, steps: int) -> None:
        """What the epoch was like, over all ranks; all must call it. `steps` are those of this launch."""
        self.flush()
        if steps == 0:
            return  # saved at the very end of an epoch, which was written down then
        mine = (elapsed(self._before, self._clock.read()), self._num_samples)
        everyone = self._engine.link.gather_objects(mine)
        self._clock.lap("communication")
        seconds = [rank_seconds for rank_seconds, _ in everyone]
        num_samples = sum(samples for _, samples in everyone)
        longest = max(sum(rank.values()) for rank in seconds)
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        loss = math.fsum(finite) / len(finite) if finite else math.nan
        skipped = self._engine.skips.state()[0] - self._skipped
        computing, speed = computing_share(*seconds), num_samples / longest
        record = {
            "kind": "epoch",
            "step": self._engine.num_steps - 1,
            "epoch": self._position.epoch,
            **({} if self._stage is None else {"stage": self._stage}),
            "steps": steps,
            "loss": loss,
            "skipped": skipped,
            "samples": num_samples,
            "objects_per_s": speed,
            "padding": self._padding,
            "computing": computing,
            **counters(self._engine),
            "seconds": [{phase: round(value, 6) for phase, value in rank.items()} for rank in seconds],
        }
        for watcher in self._watchers:
            watcher.epoch(record)
        self._progress.tell(
            epoch_line(self._title, steps, longest, computing, loss=loss, padding=self._padding, objects_per_s=speed)
        )
        if skipped:
            self._progress.tell(f"  {skipped} of these steps skipped: their gradients were not finite")
        self._clock.lap("logging")

    def close(self, status: str) -> None:
        """The run went as it should."""
        self.flush()
        self._status = status
        self.end()

    def end(self) -> None:
        """Let go of files and terminal, also after a failure, and also where one watcher cannot end."""
        if self._is_over:
            return
        self._is_over = True
        self._progress.close()
        failed: list[Exception] = []
        for watcher in self._watchers:
            try:
                watcher.end(self._status)
            except Exception as error:
                failed.append(error)
                self._progress.say(f"{type(watcher).__name__} could not end: {type(error).__name__}: {error}")
        if failed and self._status != "failed":  # else what made the run fail matters more
            raise failed[0]

    @property
    def _title(self) -> str:
        stage = "" if self._stage is None else f"stage {self._stage}, "
        return f"{stage}epoch {self._position.epoch + 1}"


def _read_losses(steps: list[Step]) -> list[float]:
    """All losses in one transfer."""
    if steps[0].loss_sum.device.type == "cpu":
        return [step.loss for step in steps]
    sums = torch.stack([step.loss_sum.double() for step in steps])
    counts = torch.stack([torch.as_tensor(step.count).to(sums, non_blocking=True) for step in steps])
    return [float(value) for value in (sums / counts).tolist()]
