"""Duties: what happens between steps. Each says when it is due next, and attends to it.

A run attends to its duties in a fixed order on all ranks: come together, log, check losses, validate, save, leave,
replicate. At most steps nothing is due, which costs one comparison of integers (`Run.next_due`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.train.divergence import Diverged, judge_skips, judge_weights, not_finite
from paceline.train.due import Outcome, ended_by, is_new_best, is_out_of_steps, next_multiple, save_interval
from paceline.train.norm_statistics import measure_statistics, norm_layers
from paceline.train.position import Position
from paceline.train.save_interval import SaveInterval
from paceline.train.validate import UnknownMonitor, fixed_set
from paceline.world.failure.flight_recorder import SAVING, trail
from paceline.world.link import Link

if TYPE_CHECKING:
    from paceline.train.feed import Feed
    from paceline.train.run import Run

NEVER = sys.maxsize
"""Number of steps that no run reaches."""


class Moment(NamedTuple):
    """State of the run after a step, as the duties judge it. Ranks that are together have the same."""

    since: Position
    """Position at which the duties were last attended to."""
    stop: bool = False
    """True if some rank was asked to stop."""
    regroups: bool = False
    """True if ranks were asked to leave only because another process waits to join."""
    is_together: bool = True
    """True if all ranks have the same weights, or get them without an average that would not have been."""
    is_ready: bool = True
    """True if ranks are together, or the run ends here. Those that step apart (`reduce: param`) wait until then."""
    is_out_of_data: bool = False
    """Data of unknown length: no rank has more."""
    is_last: bool = False
    """The step's batch was the last of the epoch."""
    grains: Sequence[Grain] = ()
    """Grains of this rank in the step."""

    @classmethod
    def at(
        cls,
        position: Position,
        since: Position,
        config: TrainConfig,
        *,
        stop: bool = False,
        regroups: bool = False,
        is_together: bool = True,
        is_out_of_data: bool = False,
        is_last: bool = False,
        grains: Sequence[Grain] = (),
    ) -> Moment:
        """Return the moment at a position."""
        is_ready = is_together or stop or is_out_of_data or is_out_of_steps(config, position)
        return cls(since, stop, regroups, is_together, is_ready, is_out_of_data, is_last, grains)


class Duty(Protocol):
    """Work between steps, such as logging or saving."""

    def next_due(self, position: Position) -> int:
        """Return the next number of steps at which this is due, unless a signal comes first."""
        ...

    def is_due(self, position: Position, moment: Moment) -> bool:
        """Return True if this is due at a position; the same on all ranks."""
        return moment.is_ready and self.next_due(moment.since) <= position.num_steps

    def needs_sync(self, moment: Moment) -> bool:
        """Return True if ranks must come together before this is attended to."""
        return not moment.is_together

    def begin(self, run: Run, feed: Feed) -> None:
        """Called before the first step of a stage, when everything is set up."""
        return

    def attend(self, run: Run, moment: Moment) -> Outcome | None:
        """Do what is due. Return the reason to leave the loop over the epoch's batches, None to continue."""
        ...


class Log(Duty):
    """Reads the losses from the device every `log_every` steps, logs and checks them."""

    def __init__(self, config: TrainConfig) -> None:
        self._every = config.log_every

    def next_due(self, position: Position) -> int:
        return next_multiple(position.num_steps, self._every)

    def attend(self, run: Run, moment: Moment) -> None:
        run.log.flush()
        check_losses(run)


class Validate(Duty):
    """Validates every `val_every_steps` steps."""

    def __init__(self, config: TrainConfig) -> None:
        self._every = config.val_every_steps

    def next_due(self, position: Position) -> int:
        return NEVER if self._every is None else next_multiple(position.num_steps, self._every)

    def needs_sync(self, moment: Moment) -> bool:
        return True

    def attend(self, run: Run, moment: Moment) -> None:
        validate(run)


class Save(Duty):
    """Saves every `save_every_steps` steps, after a validation with the best score so far, and before a stop."""

    def __init__(self, config: TrainConfig, link: Link) -> None:
        self._config, self._interval = config, SaveInterval(config, link)

    def next_due(self, position: Position) -> int:
        every = save_interval(self._config, position)
        return NEVER if every is None else next_multiple(position.num_steps, every)

    def is_due(self, position: Position, moment: Moment) -> bool:
        is_asked = moment.stop or is_new_best(self._config, position)
        return (moment.is_ready and is_asked) or super().is_due(position, moment)

    def needs_sync(self, moment: Moment) -> bool:
        return True

    def attend(self, run: Run, moment: Moment) -> None:
        began = time.monotonic()
        save(run)
        chosen = self._interval.saved(run.position, began, time.monotonic(), run.checkpoints.write_s)
        if chosen is not None:
            every, line = chosen
            run.move(replace(run.position, save_every=every))
            run.progress.say(line)


class Leave(Duty):
    """Ends the loop over an epoch's batches: asked to stop, out of data, of patience or of steps."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def next_due(self, position: Position) -> int:
        steps = self._config.steps
        return NEVER if steps is None else position.stage_began + steps

    def is_due(self, position: Position, moment: Moment) -> bool:
        return moment.is_ready and self.outcome(position, moment) is not None

    def attend(self, run: Run, moment: Moment) -> Outcome | None:
        return self.outcome(run.position, moment)

    def outcome(self, position: Position, moment: Moment) -> Outcome | None:
        """Return the reason to leave the loop at a position, None if there is none."""
        if moment.stop:
            return Outcome.STOPPED
        if moment.is_last:
            return None  # the epoch ends by itself
        if moment.is_out_of_data:
            return Outcome.OUT_OF_DATA  # the same on several ranks, where no batch is known to be the last
        return ended_by(self._config, position)


def come_together(run: Run) -> None:
    """Give all ranks the same weights, where they step apart."""
    run.clock.lap("other")
    run.stepper.sync()
    run.clock.lap("communication")


def check_losses(run: Run, *, is_over: bool = False) -> None:
    """Raise `Diverged` on all ranks if losses or skipped steps say so; `is_over` if the stage has no more steps."""
    if not run.is_kept:
        return
    why = run.log.losses.verdict(run.position.num_steps, is_over=is_over)
    if why is None and is_over:
        skipped = run.link.gather_objects(run.stepper.skips.state()[0])  # with `reduce: param` each rank has its own
        why = judge_skips(max(skipped), run.stepper.num_steps)
    if why is not None:
        raise Diverged(why)


def check_weights(run: Run) -> None:
    """Raise `Diverged` on all ranks if a weight is not finite: such weights are never saved."""
    if not run.is_kept:
        return
    names = run.link.gather_objects(not_finite(run.stepper.prepared))  # shards are of one rank each
    why = judge_weights(sorted({name for of_rank in names for name in of_rank}))
    if why is not None:
        raise Diverged(why)


def validate(run: Run, *, is_due: bool = True) -> None:
    """Validate, unless these weights were validated already; `is_due` False if no interval asked for it."""
    if run.position.is_fresh:
        return  # due by steps and by epochs: one validation of the same weights is enough
    run.clock.lap("other")
    trail.doing = "validating"
    run.log.flush()
    run.average.attend(run)
    validation = run.validation
    metrics = validation.run()
    if metrics:
        try:
            run.move(validation.judge(run.position, is_due=is_due))
        except UnknownMonitor:
            run.move(replace(run.position, validated=run.position.num_steps, score=None))
            save(run)  # no step is lost with a misspelt name
            raise
        if is_due and run.position.score is not None:
            run.stepper.schedulers.validated(run.position.score)
        run.log.validation(metrics, validation.samples, validation.seconds, validation.analysis)
    run.clock.lap("validation")


class MeasureAverage:
    """Measures the batch-norm statistics of a mean of weights (`swa_start`), which no step has made."""

    def __init__(self) -> None:
        self._measured_at = -1

    def attend(self, run: Run) -> None:
        """Measure, unless the average does not need it or was measured after this step already."""
        stepper, config, step = run.stepper, run.config, run.stepper.num_steps
        average = stepper.prepared.average
        if average is None or not average.wants_statistics(step) or self._measured_at == step:
            return
        if not norm_layers(stepper.model):
            return
        self._measured_at = step
        assert run.stages.data is not None, "a stage has its data before its first step"
        batches = fixed_set(run.task, stepper, config, run.resume.grains, "training data", run.stages.data)
        average.statistics = measure_statistics(run.task, stepper, batches, config.swa_statistics, config.seed)


def save(run: Run) -> None:
    """Save a checkpoint; survivors also replicate it, so that no replica is older than a checkpoint."""
    run.clock.lap("other")
    trail.doing = SAVING
    run.log.flush()  # a step is written down before a checkpoint that contains it
    run.keep_first_loss()
    check_weights(run)
    run.average.attend(run)
    score = run.position.score if run.position.is_fresh else None
    run.checkpoints.save(run.state(), score)
    run.clock.lap("checkpoint")
    if run.survival is not None and run.survival.is_renewed:
        run.survival.replicate(run)
