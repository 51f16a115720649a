"""Metrics logger: keeps steps on the device, reads them together, and hands them to the callbacks and the console.

The logbook owns the losses, the skips and the findings of an epoch; the meter owns its times, amounts and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.disk import DiskFull, is_full
from paceline.core.units import counted
from paceline.data.grain import Batch
from paceline.observe.callback import Callback, RunInfo
from paceline.observe.epoch import EpochSums, Mean
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress, Whole, epoch_line
from paceline.observe.records import (
    Analysis,
    EpochRecord,
    Finding,
    Launch,
    Matter,
    ProgressRecord,
    RanksRecord,
    Samples,
    StepRecord,
    ValidationRecord,
)
from paceline.observe.throughput import Units
from paceline.observe.verdict import news, verdict
from paceline.optim.larc import Larc
from paceline.parallel.step import Average, Step
from paceline.speed.verdicts import slow_depthwise
from paceline.train.divergence import EpochLosses, LossWatch
from paceline.train.feed import Feed
from paceline.train.meter import Meter
from paceline.train.outlook import Outlook, Pace
from paceline.train.position import Position
from paceline.train.stepper import Stepper
from paceline.train.summary import DataFacts

PROGRESS_S = 0.5
"""Pause between two looks at the progress in the journal."""
_NOT_TRAINING = ("setup", "validation", "checkpoint")
"""Phases that are left out of the speed of steps."""


class Logbook:
    """Passes what the loop does on to the callbacks and the console. Only the first rank has callbacks."""

    def __init__(
        self,
        watchers: Sequence[Callback],
        progress: Progress,
        stepper: Stepper,
        position: Callable[[], Position],
        meter: Meter,
        more: Callable[[], dict[str, float]] = dict,
        losses: LossWatch | None = None,
        scalars: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`position` returns the current position, `more` further numbers of the last step, `scalars` those of the task
        since the last line, on all ranks; they are read from the device when something is logged."""
        self._scalars = scalars
        self._watchers, self._progress, self._stepper, self._where = watchers, progress, stepper, position
        self._meter, self._clock, self._more = meter, meter.clock, more
        self._pending: list[tuple[Step, float | None]] = []
        self._status = "failed"  # until the run is closed
        self._is_over = self._is_in_epoch = False
        self._started: list[Callback] = []
        self._folder: Path | None = None
        self._mean = Mean()
        self._findings: dict[Matter, Finding] = {}
        self._told: dict[Matter, float] = {}
        self._skipped = self._first = 0
        self._outlook = Outlook(None, None, None)
        self._pace: Pace | None = None
        self._speed = _Speed()
        self._whole: Whole | None = None
        self._stage: str | None = None
        self._padding: float | None = None
        self._epoch_losses = EpochLosses()
        self.losses = losses or LossWatch(None)
        """Judge of the losses that were read."""
        self.loss = float("nan")
        """Loss of the last step that was read."""
        stepper.on_average(self._complete)

    def start(self, info: RunInfo) -> None:
        self._folder = info.folder
        for watcher in self._watchers:
            watcher.start(info)
            self._started.append(watcher)

    def note(self, step: Step, batch: Batch) -> None:
        self._pending.append((step, self._stepper.rate))
        self._speed.num_samples += batch.num_samples
        self._meter.note(batch)

    def _complete(self, average: Average) -> None:
        """Replace records of this rank alone (`reduce: param`) by those of all ranks."""
        complete = {step.number: step for step in average.steps}
        self._pending = [(_completed(step, complete), rate) for step, rate in self._pending]

    def flush(self) -> None:
        """Read the losses since the last time from the device, in one transfer, and log them.

        Steps of ranks that step apart (`reduce: param`) are kept until their losses are of all ranks. Raises
        `TooManySkipped`, once they are logged.
        """
        self._flush()
        self._stepper.skips.check(self._stepper.num_steps)

    def _flush(self) -> None:
        ready = [entry for entry in self._pending if not entry[0].is_local]
        if not ready:
            return
        self._pending = [entry for entry in self._pending if entry[0].is_local]
        losses, norms = _read_numbers([step for step, _ in ready])
        skipped, _ = self._stepper.skips.state()
        self._clock.lap("compute")  # what was waited for is the device
        self._meter.settle()
        self.loss = losses[-1]
        noted = [(step.number, loss) for (step, _), loss in zip(ready, losses, strict=True)]
        self.losses.note(noted, self._position.stage_began)
        self._mean.add(losses)
        scalars = self._scalars()  # of all ranks
        if self._watchers:
            epoch = self._epoch
            records = [
                StepRecord.line(step.number, epoch, loss, rate, _with_norm(step.notes, norm))
                for (step, rate), loss, norm in zip(ready, losses, norms, strict=True)
            ]
            records[-1] |= self._more() | scalars
            with self._writing():
                for watcher in self._watchers:
                    watcher.step(records)
        self._look_ahead()
        self._progress.step(self._position.step, self.loss, self._stepper.rate, skipped, self._whole)
        self._clock.lap("logging")

    def _look_ahead(self) -> None:
        """Estimate how far the run is and what is left of it, and log that from time to time."""
        now_s, num_steps, total = time.monotonic(), self._stepper.num_steps, self._outlook.total_steps
        if total is not None and self._pace is not None:
            self._whole = Whole(num_steps / total, self._pace.left_s(num_steps, now_s, total))
        if not self._watchers or not self._speed.is_due(now_s):
            return
        done, left_s = (None, None) if self._whole is None else self._whole
        record = ProgressRecord(
            num_steps - 1,
            self._epoch,
            self._outlook.epochs,
            self._outlook.stage,
            None if done is None else round(done, 6),
            None if left_s is None else round(left_s, 1),
            round(time.time(), 1),
            self._speed.read(self._clock.read(), now_s),
        ).to_json()
        with self._writing():
            for watcher in self._watchers:
                watcher.progress(record)

    def validation(
        self,
        metrics: dict[str, float],
        samples: Samples | None = None,
        seconds: float = 0.0,
        analysis: Analysis | None = None,
    ) -> None:
        self.flush()
        step = self._stepper.num_steps - 1
        record = ValidationRecord(step, self._epoch, round(seconds, 6), metrics, samples, analysis).to_json()
        with self._writing():
            for watcher in self._watchers:
                watcher.validation(record)
        self._progress.validation(metrics, samples)

    def ranks(self, record: RanksRecord) -> None:
        """Log which ranks the run goes on with."""
        line = record.to_json()
        with self._writing():
            for watcher in self._watchers:
                watcher.ranks(line)

    def begin_epoch(self, feed: Feed, data: DataFacts, stage: str | None, outlook: Outlook) -> None:
        """Start the sums of an epoch, or go on with those of a checkpoint; `stage` is named where there are several."""
        self._clock.lap("setup")
        self._stage, self._padding, self._outlook = stage, data.padding, outlook
        self._progress.epoch(outlook.title(self._position.epoch), outlook.epoch_steps, self._position.step)
        self._clock.lap("logging")
        if self._pace is None:
            self._pace = Pace(self._stepper.num_steps, time.monotonic())
            self._speed.begin(self._clock.read())
        self._meter.begin_epoch(feed, self._position.epoch, self._position.step)
        earlier = self._meter.earlier
        self._first, self._mean = self._position.step, Mean(earlier.losses, earlier.num_losses)
        self._skipped = self._stepper.skips.state()[0] - earlier.skipped
        self._is_in_epoch = True

    def end_epoch(self) -> None:
        """Log the epoch as far as it was trained, over all ranks; all must call it. Between epochs there is none."""
        if not self._is_in_epoch:
            return
        self._is_in_epoch = False
        self._flush()
        self._write_epoch()
        self._stepper.skips.check(self._stepper.num_steps)

    def _write_epoch(self) -> None:
        steps, earlier = self._position.step - self._first, self._meter.earlier  # of this launch, and of those before
        if steps == 0 and (earlier.steps == 0 or self._is_written):
            return  # saved at the very end of an epoch
        launch, whole = self._meter.end_epoch() if steps else (self._meter.recall(), None)
        loss = self._mean.value
        skipped = self._stepper.skips.state()[0] - self._skipped
        record = replace(
            launch,
            step=self._stepper.num_steps - 1,
            epoch=self._epoch,
            stage=self._stage,
            steps=steps or earlier.steps,
            loss=loss,
            skipped=skipped,
            padding=self._padding,
            **self._stepper.counters(),
        )
        findings = verdict(record, [slow_depthwise])
        if whole is not None and earlier.steps:
            record = replace(
                record.with_whole(whole), steps=earlier.steps + steps, launch=Launch(steps, record.elapsed_s)
            )
        line = replace(record, findings=findings).to_json()
        with self._writing():
            for watcher in self._watchers:
                watcher.epoch(line)
        self._progress.tell(
            epoch_line(
                self._title,
                record.steps,
                record.elapsed_s,
                record.computing or 0.0,
                loss=loss,
                padding=self._padding,
                speeds=speeds(record, self._meter.units),
                standing=self._standing,
            )
        )
        if skipped:
            self._progress.tell(f"  {skipped} of these steps skipped: their gradients were not finite")
        relapse = self._epoch_losses.note(self._stage, loss)
        if relapse is not None:
            advice = "a lower `--lr`, a longer `--warmup-steps` or a smaller `--clip-norm` may keep what was learned"
            self._progress.tell(f"  unlearned: {relapse}: {advice}")
        if findings and record.launch is not None:
            self._progress.tell(f"  the run was resumed: what held it back is of the last {steps} of these steps")
        self._tell_findings(findings)
        self._clock.lap("logging")

    def so_far(self) -> dict[str, Any] | None:
        """Return the sums of the epoch so far, for a checkpoint; None between epochs. All ranks must call it."""
        if self._position.step == 0:
            return None
        steps = self._meter.earlier.steps + self._position.step - self._first
        skipped = self._stepper.skips.state()[0] - self._skipped
        ranks, losses = tuple(self._meter.so_far()), tuple(self._mean.parts)
        return EpochSums(steps, losses, self._mean.number, skipped, ranks).state()

    @property
    def _is_written(self) -> bool:
        """True if the journal has the epoch that ends with the last step; there is one on the first rank only."""
        last = self._stepper.num_steps - 1
        return all(watcher.last_epoch == last for watcher in self._watchers if isinstance(watcher, Journal))

    def _tell_findings(self, findings: list[Finding]) -> None:
        """Each matter once, and again when it has become another one in size."""
        for finding in news(self._told, findings):
            self._told[finding.matter] = finding.share
            self._progress.tell(f"  held back: {finding.line}")
        self._findings |= {finding.matter: finding for finding in findings}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Reasons that held the run back so far: the last word on each matter, the costliest first."""
        return tuple(sorted(self._findings.values(), key=lambda finding: -finding.share))

    def close(self, status: str) -> None:
        """End a run that went well."""
        self.flush()
        self._status = status
        self.end()

    def suspend(self) -> None:
        """End this rank's part of a run that goes on in another round, perhaps with another first rank."""
        self._status = "stopped"
        self.end()

    def end(self) -> None:
        """Give files and terminal back, also after a failure, and also where one callback cannot end."""
        if self._is_over:
            return
        self._is_over = True
        self._progress.close()
        failed: list[Exception] = []
        for watcher in self._started:
            try:
                watcher.end(self._status)
            except Exception as error:
                if self._status == "failed" and is_full(error):
                    continue  # reported already, or less important than what made the run fail
                failed.append(error)
                self._progress.say(f"{type(watcher).__name__} could not end: {type(error).__name__}: {error}")
        if failed and self._status != "failed":  # else what made the run fail matters more
            raise failed[0]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Report a full disk as a mistake that the user can mend."""
        try:
            yield
        except OSError as error:
            if self._folder is None or not is_full(error):
                raise
            raise DiskFull(self._folder, error, "free some space there, then go on with `--resume auto`") from error

    @property
    def _position(self) -> Position:
        return self._where()

    @property
    def _title(self) -> str:
        stage = "" if self._stage is None else f"stage {self._stage}, "
        return f"{stage}epoch {self._epoch}"

    @property
    def _epoch(self) -> int:
        """Epoch of the last step, counted from 1, as everything that a user sees counts them."""
        position = self._position
        return max(1, position.epoch + (position.step > 0))

    @property
    def _standing(self) -> list[str]:
        """Words on what is left of the run; none at its end."""
        if self._whole is None or self._whole.done >= 1:
            return []
        epochs = self._outlook.epochs
        return [
            *([] if epochs is None else [f"{self._epoch} of {counted(epochs, 'epoch')}"]),
            self._whole.phrase,
        ]


class _Speed:
    """Samples per second between two looks, without what is not training."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._before_s, self._next_s = 0.0, 0.0

    def begin(self, seconds: Mapping[str, float]) -> None:
        self._before_s = _training_s(seconds)

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s and self.num_samples > 0

    def read(self, seconds: Mapping[str, float], now_s: float) -> float | None:
        """Return the speed since the last time, of a clock's reading, and start anew."""
        training_s = _training_s(seconds)
        num_samples, took_s = self.num_samples, training_s - self._before_s
        self.num_samples, self._before_s, self._next_s = 0, training_s, now_s + PROGRESS_S
        return None if took_s <= 0 else float(f"{num_samples / took_s:.5g}")


def _training_s(seconds: Mapping[str, float]) -> float:
    return sum(value for phase, value in seconds.items() if phase not in _NOT_TRAINING)


def _completed(step: Step, complete: Mapping[int, Step]) -> Step:
    """Return a step of this rank as one of all ranks; the norm of its gradients stays this rank's own."""
    whole = complete.get(step.number)
    return step if whole is None else replace(whole, gradient_norm=step.gradient_norm)


def _with_norm(notes: Mapping[str, float], norm: float | None) -> Mapping[str, float]:
    return notes if norm is None else {"gradient_norm": norm, **notes}


def _read_numbers(steps: list[Step]) -> tuple[list[float], list[float | None]]:
    """Return all losses, and the norms of gradients where there are any, in one transfer."""
    norms = [step.gradient_norm for step in steps]
    if steps[0].loss_sum.device.type == "cpu":
        return [step.loss for step in steps], [None if norm is None else float(norm) for norm in norms]
    sums = torch.stack([step.loss_sum.double() for step in steps])
    counts = torch.stack([torch.as_tensor(step.count, dtype=sums.dtype, device=sums.device) for step in steps])
    known = [norm.to(sums) for norm in norms if norm is not None]
    numbers = iter(torch.cat([sums / counts, torch.stack(known)] if known else [sums / counts]).tolist())
    losses = [float(next(numbers)) for _ in steps]
    return losses, [None if norm is None else float(next(numbers)) for norm in norms]


def speeds(record: EpochRecord, units: Units) -> list[str]:
    """Return the speeds of an epoch in words, and what share of the devices' peak and of their memory that took."""
    phrases = [units.phrase(name, rate) for name, rate in record.rates.items()]
    if record.mfu is not None:
        phrases.append(f"{100 * record.mfu:.1f}% of peak FLOP/s")
    device_bytes = [rank.device_bytes for rank in record.memory if rank.device_bytes is not None]
    if device_bytes:
        phrases.append(f"{max(device_bytes) / 2**30:.3g} GiB")
    return phrases


def notes(stepper: Stepper, larc: Larc | None) -> dict[str, float]:
    """Return numbers of the last step beside its loss: the loss scale, and LARC's learning rates by parameter."""
    scale = {"loss_scale": stepper.scale.current()} if stepper.precision.scaled else {}
    rates = {} if larc is None else larc.rates(stepper.prepared.optimizer_names())
    return {**scale, **{f"larc/{name}": rate for name, rate in rates.items()}}
