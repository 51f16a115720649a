"""The training loop. Read `Trainer._train_epoch` and `stepper.Engine.step` and you know how training works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from paceline.config.settings import TrainConfig
from paceline.core.keys import key
from paceline.core.secrets import masked_values
from paceline.core.units import counted, plural
from paceline.data.grain import Batch
from paceline.data.torch_loader import take_out_for_training
from paceline.observe.callback import Callback, RunInfo
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress
from paceline.observe.rank_log import rank_log
from paceline.observe.records import Finding
from paceline.observe.timeline import recorder as timeline
from paceline.optim import build, schedule
from paceline.parallel.step import Step
from paceline.speed import precision
from paceline.speed.autotune.choice import Choice
from paceline.train import setup, summary
from paceline.train import task as tasks
from paceline.train.autotune import autotuner
from paceline.train.autotune.shapes import LOOKED_AT
from paceline.train.checkpoint import state
from paceline.train.checkpoint.checkpoints import Checkpoints
from paceline.train.checkpoint.contents import RunState, RunValues
from paceline.train.checkpoint.reader import Checkpoint
from paceline.train.checkpoint.session import RunSession
from paceline.train.divergence import Diverged, LossWatch, judge_skips, judge_weights, not_finite
from paceline.train.due import (
    Due,
    Outcome,
    Signals,
    best_score,
    due,
    is_multiple,
    is_new_best,
    is_out_of_patience,
    is_stage_over,
    next_due,
    outcome_at,
    validates_at_end,
)
from paceline.train.feed import DataChanged, Feed, NothingRead, StreamState, TrainingData
from paceline.train.logbook import Logbook, notes
from paceline.train.loss import TooManySkipped
from paceline.train.meter import Meter, make_clock
from paceline.train.norm_statistics import StatisticsNeedLength, measure_statistics, norm_layers
from paceline.train.outlook import outlook
from paceline.train.position import Position
from paceline.train.prepare import sums_in_tree
from paceline.train.probe import Probe
from paceline.train.save_interval import SaveInterval
from paceline.train.scalars import Scalars, calls_log
from paceline.train.stepper import Stepper
from paceline.train.survival import Regroup, Survival, price
from paceline.train.task import Stage, Surroundings, Task, overrides
from paceline.train.validate import UnknownMonitor, Validation, fixed_set
from paceline.world.failure import stacks
from paceline.world.failure.board import EXIT_CRASH
from paceline.world.failure.flight_recorder import SAVING, trail
from paceline.world.failure.together import is_broken_link, log_if_lost
from paceline.world.link import Link
from paceline.world.signals import StopSignals, stop_reason


@dataclass(frozen=True)
class Result:
    """Outcome of a run, in any mode."""

    status: str
    """`finished`, `early` (patience ran out), `stopped` (a signal asked for it; `--resume auto` goes on) or `diverged`
    (its loss exploded or its weights are not finite: only what came before is saved); of the other modes `evaluated`,
    `predicted` or `measured`."""
    num_steps: int
    loss: float
    """Loss of the last step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last validation, as `set/metric`."""
    best_score: float | None = None
    """The best score of a validation: see `monitor`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by phase."""
    findings: tuple[Finding, ...] = ()
    """Reasons that held the run back, and what to type: the last word on each matter."""
    mode: str = "train_eval"
    """Mode as in the settings, or `benchmark`."""
    predictions: Path | None = None
    """The file that mode `infer` wrote."""
    folder: Path | None = None
    """The run folder, if there is one; of a run at an address, the copy on this machine."""
    address: str | None = None
    """Address of the run, such as `s3://bucket/run`; None where its folder is one of this machine."""
    is_delivered: bool = True
    """False if the last upload to the address failed: `folder` has all of the run, and `resume="auto"` sends it."""
    checkpoint: Path | None = None
    """The last checkpoint of the run; of the modes `eval` and `infer` the one that was used."""
    best: Path | None = None
    """The checkpoint with the best score, for `paceline.load`, `init_from` or `resume`; None where none has one."""
    model: torch.nn.Module | None = field(default=None, repr=False, compare=False)
    """The trained model, in evaluation mode, as the last step left it: on this rank's device and in the dtype that it
    was trained in. `paceline.load(result.folder)` gives the best one in fp32, and its average if the run kept one; with
    `shard` this one is in pieces."""

    @property
    def best_checkpoint(self) -> Path | None:
        """Name of `best` in earlier versions, where `best` was `best_score`."""
        return self.best


class Trainer:
    """Trains a task on the ranks of a link, from the beginning or from where the run was.

    Opening a run succeeds or undoes itself: after a failure here no folder is locked or marked as running.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        link: Link,
        watchers: Sequence[Callback] = (),
        *,
        probe: Probe | None = None,
        survival: Survival | None = None,
    ) -> None:
        """With `survival` a rank that is lost ends the round, not the run, which `train_in_rounds` goes on with."""
        self.clock = make_clock(link.device)
        self.task, self.link = task, link
        self.progress = Progress(link.is_first, config.progress, is_relayed=link.world.is_relayed)
        self._probe, self._survival = probe, survival
        self._somebody_joins = False
        self.is_asked_to_stop = False
        """True if this process was asked to stop; engines are also asked to when somebody waits to join."""
        goes_on = survival is not None and survival.round.number > 0
        tasks.check_ranks(task, config, link)  # before anything is written
        name = task.spec or type(task).__name__
        used = setup.plugins_of(task, config, link.world.launcher)
        self.session = RunSession(config, link, self.progress.say, name, plugins=used, is_reopened=goes_on)
        self.resume = self.session.resume
        self.config = config = self.resume.config
        self.checkpoints = Checkpoints(self.resume, link, self.progress.say, self.session.on_written)
        checkpoint = self.checkpoints.find_newest(None if survival is None else survival.memory.checkpoint())
        values = None if checkpoint is None else RunValues.of(checkpoint)
        stacks.send_to(self.session.rank_log_file)
        norm_every = config.log_every if probe is None else None
        self.stepper = Stepper(config, link, clock=self.clock, norm_every=norm_every)
        self._few_shapes = setup.few_shapes(config, self.stepper.precision, link.device, values)
        self._scalars = Scalars(link, calls_log(type(task)), lambda: self.stepper.is_counted)
        say, add = self.progress.say, self._scalars.add
        task.attach(Surroundings(config, link, say, self.stepper.evaluating, self._few_shapes, add))
        self.choice: Choice | None = None
        self._autotuner: autotuner.Autotuner | None = None
        record = None if values is None else values.choice
        # A run from before `auto` chose anything goes on as it began.
        is_new = checkpoint is None or record is not None or config.level == 4
        if is_new and autotuner.is_asked(config, precision.capabilities(link.device)):
            self._autotuner = autotuner.Autotuner(task, config, link, self.progress, lambda: self.stepper.wants_stop)
            self._compute_in(self._autotuner, None if record is None else self._autotuner.recall(record))
        self.position = Position()
        self._save_interval = SaveInterval(config, link)
        stages = tasks.stages_of(task)
        self.stages = list(stages) if probe is None else probe.stages(stages)
        self._began_stage = -1
        self._measured = -1
        """Step of which the average's batch-norm statistics are."""
        self._current: Feed | None = None
        self._stage_data: object = None
        """Of the stage that is trained, as the task gave it."""
        self._stream_saved: dict[str, torch.Tensor] = {}
        self._build(is_new=checkpoint is None)
        self._resumed = None if checkpoint is None or values is None else self._resume(checkpoint, values)
        self.validation = Validation(task, self.stepper, config, self.resume.grains)
        self.timeline = timeline.build(
            config, config.out, link, self.clock, lambda: self.stepper.num_steps, self.progress.say
        )
        callbacks = setup.callbacks(task, config, self.progress.say, watchers) if link.is_first else []
        so_far = None if values is None else values.so_far
        del checkpoint  # its tensors are mapped from files, and would keep them on disk
        meter = Meter(self.clock, self.stepper, task, config, so_far)
        with ExitStack() as undo:  # from here on there is something to undo: files, a lock, callbacks that have started
            self.session.open()
            undo.callback(self.session.fail)
            self.checkpoints.open()
            undo.callback(self.checkpoints.fail)
            if self.session.metrics_file is not None:
                done, validated = self.stepper.num_steps, max(0, self.position.validated)
                callbacks.insert(0, Journal(self.session.metrics_file, next_step=done, next_validation=validated))
            self.log = Logbook(
                callbacks,
                self.progress,
                self.stepper,
                lambda: self.position,
                meter,
                lambda: notes(self.stepper, self.larc),
                LossWatch(config.max_loss_ratio, self.position.first_loss),
                self._scalars.read,
            )
            undo.callback(self.log.end)
            self.log.start(self._info())
            if survival is not None:
                self._begin_round(survival)
            undo.pop_all()
        self._is_introduced = goes_on
        self.clock.lap("setup")

    def fit(self) -> Result:
        """Train to the end, to early stopping, or until asked to stop."""
        saves = self.config.out is not None and self._probe is None
        with StopSignals(self.ask_to_stop, saves=saves, speaks=self.link.is_first) as signals:
            try:
                with rank_log(self.session.rank_log_file, summary.rank_line(self.link)):
                    with log_if_lost(self.link.world):
                        outcome = self._train_stages()
                        self._leave_round_if_asked(outcome)
                    signals.is_closing = True
                    # One that a probe ended has no run to go on with, and must not say so.
                    return self._close(outcome.status if self._probe is None else "finished")
            except BaseException as error:
                if self._survival is not None and (isinstance(error, Regroup) or is_broken_link(error)):
                    self.log.suspend()
                    self.checkpoints.suspend()
                    self.session.suspend()
                    self.timeline.abandon()
                    raise
                self.checkpoints.fail()
                self.session.fail("diverged" if isinstance(error, TooManySkipped) else "failed")
                self.timeline.abandon()
                raise
            finally:
                self.validation.close()
                self.log.end()  # whatever happens, the terminal is given back

    def ask_to_stop(self) -> None:
        """Save and leave soon: all ranks learn of it with the reduction of the next step."""
        if self._survival is not None and self._survival.is_cut_loose():
            os._exit(EXIT_CRASH)  # a signal of the system, not of the user: the others are not to stop because of it
        self.is_asked_to_stop = True
        self.stepper.ask_to_stop()

    def ask_to_regroup(self) -> None:
        """Leave the round soon, because somebody waits to join; in a thread, as `ask_to_stop`."""
        self.stepper.ask_to_stop()

    # -- rounds: the ranks that are there --------------------------------------------------------------------------

    def _begin_round(self, survival: Survival) -> None:
        """Tell the user and the journal who is there."""
        num_steps = self.stepper.num_steps
        for line in survival.lines(num_steps):
            self.progress.say(line)
        self.log.ranks(survival.record(num_steps, self.position.epoch + 1))
        survival.begin(num_steps)

    def _remember(self) -> None:
        """Copy the state of the run into the memory of every rank, if ranks may be lost and each has all of it."""
        survival = self._survival
        if survival is None or not survival.has_copies:
            return
        self.clock.lap("other")
        began = time.monotonic()
        self.log.flush()
        self._keep_first_loss()
        self.checkpoints.remember(self._state(), survival.memory)
        num_steps = self.stepper.num_steps
        survival.agree(num_steps, time.monotonic() - began, self.link)
        self.clock.lap("checkpoint")

    def _copies_now(self, survival: Survival) -> bool:
        """Return True if a copy is due, and the ranks are together."""
        is_due = self._somebody_joins or survival.is_due(self.position.num_steps)
        return is_due and self.stepper.is_together

    def _waits_only_for_joiners(self, step: Step) -> bool:
        """Return True if ranks are asked to stop, as of this step on all, and only because somebody waits to join.

        Where no rank has the whole state, that is a stop like another: the run is saved.
        """
        survival = self._survival
        if survival is None or not survival.has_copies or not self._stop_asked(step):
            return False
        return not any(self.link.gather_objects(self.is_asked_to_stop))

    def _leave_round_if_asked(self, outcome: Outcome) -> None:
        """Raise `Regroup` on all ranks where the run was stopped only because somebody waits to join."""
        if self._survival is None or outcome is not Outcome.STOPPED:
            return
        if not any(self.link.gather_objects(self.is_asked_to_stop)):
            raise Regroup

    # -- the loop ------------------------------------------------------------------------------------------------

    def _train_stages(self) -> Outcome:
        """Train all stages from the position on, unless a signal or divergence ends the run."""
        outcome = Outcome.EPOCH_DONE
        try:
            for number in range(self.position.stage, len(self.stages)):
                outcome = self._train_stage(number)
                if outcome is Outcome.STOPPED:
                    break
        except TooManySkipped:
            if self.config.reduce == "grad":  # else a rank may be alone with it
                with suppress(TooManySkipped):
                    self.log.end_epoch()
            raise
        except Diverged as verdict:
            self.log.end_epoch()
            self.progress.say(f"diverged after step {self.position.num_steps}: {verdict}")
            self.progress.say("  lower `--lr`, set `--clip-norm` or a warm-up, or use a level of more precision")
            return Outcome.DIVERGED
        return outcome

    def _train_stage(self, number: int) -> Outcome:
        """Train one stage, from the position on."""
        stage, config = self.stages[number], self.config
        if self._began_stage != number:
            self._begin_stage(number)
        feed = self._current = self._feed(number, stage)
        self._check_data(feed)
        reread = feed.resume_stream(self._stream_saved)
        self._stream_saved = {}
        if reread is not None:
            self.progress.say(reread)
        epochs = stage.epochs or config.epochs
        position = self.position
        if position.is_complete and (is_stage_over(config, position, epochs) or is_out_of_patience(config, position)):
            self.progress.say("this run is finished: nothing is left to train")
            return Outcome.EARLY if is_out_of_patience(config, position) else Outcome.EPOCH_DONE
        self.position = replace(position, is_complete=False)  # or it continues: with more epochs, steps or patience
        if not self._set_up(feed):
            self._save()
            return Outcome.STOPPED
        with closing(feed):
            outcome = self._train_epochs(feed, epochs)
        return outcome if outcome is Outcome.STOPPED else self._end_stage(number, outcome)

    def _train_epochs(self, feed: Feed, epochs: int | None) -> Outcome:
        """Train the epochs of a stage, from the position on."""
        config, position = self.config, self.position
        is_open = position.step > 0  # resumed inside an epoch, which is to be ended even if no step of it is left
        outcome = Outcome.EARLY if is_out_of_patience(config, position) and not is_open else Outcome.EPOCH_DONE
        goes_on = is_open or (outcome.goes_on and not is_stage_over(config, position, epochs))
        while goes_on:
            outcome = self._train_epoch(feed)
            if outcome is not Outcome.STOPPED:
                outcome = self._end_epoch(outcome)
            position = self.position
            goes_on = outcome.goes_on and not is_stage_over(config, position, epochs)
            if goes_on and (is_multiple(position.epoch, config.save_every_epochs) or is_new_best(config, position)):
                self._save()
        return outcome

    def _train_epoch(self, feed: Feed) -> Outcome:
        """Train on the batches of an epoch, from the position on."""
        position, stepper, clock = self.position, self.stepper, self.clock
        data = summary.data_facts(feed, position.epoch)
        ahead = outlook(self.config, self.stages, self._began_stage, position, data.num_steps)
        self.log.begin_epoch(feed, data, self._stage_name, ahead)
        ended = outcome_at(self.config, position, data.num_steps)
        if ended is not None:
            return ended  # resumed: it was saved with its last step
        loss, before_step, after_step = partial(self.task.loss, stepper.model), self._before_step, self._after_step
        survival, since, wake = self._survival, position.num_steps, self._next_due(feed)
        for batch in self._batches(feed):
            clock.begin_step()
            if before_step is not None:
                before_step(stepper.model, batch)
            step = stepper.step(loss, batch, self._after_backward)
            if after_step is not None:
                after_step(stepper.model, step, batch.grains)
            position = self.position = position.advance(batch)
            self.log.note(step, batch)
            clock.lap("compute")
            if position.num_steps < wake and not self._stop_asked(step):
                continue  # nothing is due at most steps
            self._somebody_joins = self._waits_only_for_joiners(step)
            now = due(self.config, position, self._signals(feed, batch, step), since)
            if now:
                now = self._attend(now, feed, batch, step, since)
                position = self.position
                since, wake = position.num_steps, self._next_due(feed)
            if now.leave is not None:
                return now.leave
            if survival is not None and self._copies_now(survival):
                self._remember()  # after all that is due: a round that goes on from here does not come to it again
                position = self.position
                wake = self._next_due(feed)
                if self._somebody_joins:
                    raise Regroup
        if position.step == 0:
            raise NothingRead(position.epoch)
        return Outcome.EPOCH_DONE

    def _batches(self, feed: Feed) -> Iterator[Batch]:
        """Batches from the position on; none if the run was saved at the very end of an epoch."""
        position = self.position
        if position.is_epoch_over:
            return iter(())
        return self.timeline.follow(feed.batches(position.epoch, position.step))

    def _next_due(self, feed: Feed) -> int:
        """Number of steps from which on `due` must be asked; with data of unknown length any step may be the last."""
        others = 0 if feed.is_stream else next_due(self.config, self.position)
        return others if self._survival is None else self._survival.next_due(others)

    def _attend(self, now: Due, feed: Feed, batch: Batch, step: Step, since: int) -> Due:
        """Come together, log, validate, save: always in this order. Returns what turned out to be due."""
        if now.validate or now.save or not self.stepper.is_together:
            self._come_together()
            step = self.stepper.last_step or step
        signals = self._signals(feed, batch, step)  # the average may have told of a stop or of the end of the data
        is_epoch_over = signals.is_out_of_data or (feed.is_stream and batch.is_last)
        self.position = replace(self.position, is_epoch_over=is_epoch_over)
        now = due(self.config, self.position, signals, since)
        if now.log:
            self.log.flush()
            self._check_losses()
        if now.validate:
            self._validate()
            now = due(self.config, self.position, signals, since)  # the score may say: save, or leave
        if now.save:
            began = time.monotonic()
            self._save()
            chosen = self._save_interval.saved(self.position, began, time.monotonic(), self.checkpoints.write_s)
            if chosen is not None:
                every, line = chosen
                self.position = replace(self.position, save_every=every)
                self.progress.say(line)
        self.clock.lap("other")
        return now

    def _end_epoch(self, outcome: Outcome) -> Outcome:
        self._come_together()
        self.log.end_epoch()
        self._check_losses()
        if not outcome.is_cut_short:
            self.position = self.position.end_epoch()
            if is_multiple(self.position.epoch, self.config.val_every_epochs):
                self._validate()
        tasks.report(self.task)
        return Outcome.EARLY if is_out_of_patience(self.config, self.position) else outcome

    def _end_stage(self, number: int, outcome: Outcome) -> Outcome:
        """Let the task end the stage, validate if that is still to do, and save."""
        self._check_losses(is_over=True)
        is_last = number + 1 == len(self.stages)
        is_unseen = not self.validation.is_empty and not self.position.is_fresh
        validates = is_unseen and validates_at_end(self.config, outcome, is_last_stage=is_last)
        if validates:
            self._save()  # a validation may take long, and may fail: no step is lost with it
            if any(self.link.gather_objects(self.stepper.wants_stop)):
                return Outcome.STOPPED
        with self.stepper.whole_statistics():
            self.task.after_stage(self.stepper.model, number)
        self.clock.lap("setup")
        if validates:
            self._validate(is_due=not is_last)
            tasks.report(self.task)
        self.position = replace(self.position, is_complete=is_last)
        if not is_last:
            self.position = self.position.enter_stage(number + 1)
        self._save()
        return outcome

    # -- what a step may call for --------------------------------------------------------------------------------

    def _signals(self, feed: Feed, batch: Batch, step: Step) -> Signals:
        stop = self._stop_asked(step) and not self._somebody_joins
        return Signals(stop, self.stepper.is_together, _is_out_of_data(feed, step), batch.is_last)

    def _stop_asked(self, step: Step) -> bool:
        """Return True if any rank was asked to stop, as of the same step on all.

        On a GPU it is read at steps that are logged, where the device is waited for anyway.
        """
        if self._probe is not None and self._probe.is_over:
            return True
        if self.link.world.size == 1:
            return self.stepper.wants_stop
        if step.ranks_to_stop is None:
            return False  # ranks step apart, and learn of it with their next average
        on_host = step.ranks_to_stop.device.type == "cpu"
        return (on_host or is_multiple(self.stepper.num_steps, self.config.log_every)) and bool(step.ranks_to_stop)

    def _come_together(self) -> None:
        self.clock.lap("other")
        self.stepper.sync()
        self.clock.lap("communication")

    def _validate(self, *, is_due: bool = True) -> None:
        if self.position.is_fresh:
            return  # due by steps and by epochs: one look at the same weights is enough
        self.clock.lap("other")
        trail.doing = "validating"
        self.log.flush()
        self._measure_average()
        checks = self.validation
        metrics = checks.run()
        if metrics:
            try:
                self.position = self.validation.judge(self.position, is_due=is_due)
            except UnknownMonitor:
                self.position = replace(self.position, validated=self.position.num_steps, score=None)
                self._save()  # no step is lost with a misspelt name
                raise
            if is_due and self.position.score is not None:
                self.stepper.schedulers.validated(self.position.score)
            self.log.validation(metrics, checks.samples, checks.seconds, checks.analysis)
        self.clock.lap("validation")

    def _measure_average(self) -> None:
        """Measure the batch-norm statistics of a mean of weights (`swa_start`), which no step has made."""
        stepper, step = self.stepper, self.stepper.num_steps
        average = stepper.prepared.average
        if average is None or not average.wants_statistics(step) or self._measured == step:
            return
        if not norm_layers(stepper.model):
            return
        self._measured = step
        assert self._stage_data is not None, "a stage has its data before its first step"
        batches = fixed_set(self.task, stepper, self.config, self.resume.grains, "training data", self._stage_data)
        average.statistics = measure_statistics(
            self.task, stepper, batches, self.config.swa_statistics, self.config.seed
        )

    def _save(self) -> None:
        self.clock.lap("other")
        trail.doing = SAVING
        self.log.flush()  # a step is written down before a checkpoint that contains it
        self._keep_first_loss()
        self._check_weights()
        self._measure_average()
        score = self.position.score if self.position.is_fresh else None
        self.checkpoints.save(self._state(), score)
        self.clock.lap("checkpoint")
        if self._survival is not None and self._survival.is_renewed:
            self._remember()  # not older than any checkpoint

    def _keep_first_loss(self) -> None:
        self.position = replace(self.position, first_loss=self.log.losses.first_loss)

    def _state(self) -> RunState:
        more = partial(self._place_in_stream, self.position.epoch, self.position.step)
        choice, few = self.session.choice, self._few_shapes
        return RunState(self.stepper, self.position, self.task, self.log.so_far, choice, few, more)

    def _place_in_stream(self, epoch: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the part of a checkpoint that says where a stream is, if it knows."""
        try:
            state = {} if self._current is None else self._current.stream_state(epoch, step)
        except StreamState as error:  # no reason to lose a checkpoint
            self.progress.say(f"{error}: a resumed run reads the data again up to its place")
            self._current, state = None, {}
        return {"stream": state} if state else {}

    def _check_losses(self, *, is_over: bool = False) -> None:
        """Raise `Diverged` on all ranks if losses or skipped steps say so; `is_over` if the stage has no more steps."""
        if self._probe is not None:
            return
        why = self.log.losses.verdict(self.position.num_steps, is_over=is_over)
        if why is None and is_over:
            everyones = self.link.gather_objects(self.stepper.skips.state()[0])  # with `reduce: param` each has its own
            why = judge_skips(max(everyones), self.stepper.num_steps)
        if why is not None:
            raise Diverged(why)

    def _check_weights(self) -> None:
        """Raise `Diverged` on all ranks if a weight is not finite: such weights are never saved."""
        if self._probe is None:
            names = self.link.gather_objects(not_finite(self.stepper.prepared))  # shards are of one rank each
            why = judge_weights(sorted({name for each in names for name in each}))
            if why is not None:
                raise Diverged(why)

    # -- the way in ----------------------------------------------------------------------------------------------

    def _build(self, *, is_new: bool) -> None:
        torch.manual_seed(self.config.seed)
        model = self.task.model()
        build.freeze(model, self.config.freeze)
        if is_new:
            setup.load_weights(model, self.task, self.config.init_from, self.progress.say)
        self._prepare(model)
        self._after_backward: Callable[[], None] | None = None
        if overrides(self.task, "after_backward"):
            self._after_backward = lambda: self.task.after_backward(self.stepper.model)
        self._before_step = self.task.before_step if overrides(self.task, "before_step") else None
        self._after_step = setup.after_step(self.task, self._probe)

    def _prepare(self, model: torch.nn.Module) -> None:
        model.to(self.link.device)
        autotuner.put_kernels(self.task, model, self.stepper.precision, self.progress.say)
        self.larc = setup.prepare(self.stepper, self.task, self.config, model)

    def _resume(self, checkpoint: Checkpoint, values: RunValues) -> str:
        """Restore everything. Returns where the run goes on, in words."""
        position = Position.load(values.position)
        for number in range(position.num_begun_stages):
            self._begin_stage(number)
        state.restore(self.stepper, checkpoint.parts, values.engine)
        self.position = position
        tasks.load_state(self.task, dict(checkpoint.parts.get("task", {})))
        self._stream_saved = {name: tensor.clone() for name, tensor in checkpoint.parts.get("stream", {}).items()}
        self.resume.check_precision(values.precision, self.stepper.precision.name)
        resumed = f"after step {position.num_steps} ({checkpoint.path.name})"
        if self._survival is None or self._survival.memory.step is None:
            self.progress.say(f"resumed {resumed}")
        return resumed

    def _begin_stage(self, number: int) -> None:
        """Optimizer and schedule start anew where the stage says so; a model that changed shape is prepared again."""
        stage, model = self.stages[number], self.stepper.model
        before = build.signature(model)
        with self.stepper.whole_statistics():
            setup.begin_stage(self.task, self.config, model, number)
        changed = before != build.signature(model)
        if changed or (stage.restart_optimizer and number > 0):
            self.stepper.release()
            self._prepare(model)
        if changed and not stage.restart_optimizer and number > 0:
            self.progress.say(f"stage {stage.name!r} changed the model: the optimizer starts anew")
        if changed and self.stepper.precision.compile:
            self.progress.say(f"stage {stage.name!r} changed the model: it is compiled again")
        self.position = self.position.begin_stage(restarts_schedule=stage.restart_schedule or number == 0)
        if stage.restart_schedule:
            self.stepper.schedulers.restart()
        self._began_stage = number

    def _feed(self, number: int, stage: Stage) -> Feed:
        given = stage.data() if callable(stage.data) else stage.data
        if number == self._began_stage:  # else a later one, whose steps are counted
            self._stage_data = given
        source, lines = take_out_for_training(given, self.config)
        data, config, task = source.dataset, self.config, self.task
        collate, lengths = task.train_collate(data), tasks.lengths_of(task, data)
        for line in lines:
            self.progress.say(line)
        feed = Feed(
            TrainingData(data, collate or source.collate, lengths, tasks.counts_of(task, data)),
            config,
            self.link,
            grains=self.resume.grains,
            seed=config.seed if number == 0 else key(config.seed, number),
            clock=self.clock,
            in_blocks=sums_in_tree(config),
            end_epoch=stage.epochs or config.epochs,
        )
        if not feed.is_stream and config.batch_cost is None and len(data) < config.max_samples:
            self.progress.say(f"the batch of {config.max_samples} is larger than the data: one step of {len(data)}")
        if config.batch_cost is not None and lengths is not None:
            longer = int((np.asarray(lengths) > config.batch_cost).sum())
            if longer:
                self.progress.say(
                    f"{longer:,} of {counted(len(lengths), 'sample')} {plural(longer, 'is')} longer than the batch of "
                    f"{config.batch_cost:g} (`batch_cost`): a step of one sample each"
                )
        return feed

    def _check_data(self, feed: Feed) -> None:
        if self.position.data not in (None, feed.fingerprint) and not self.config.allow_change:
            raise DataChanged
        self.position = replace(self.position, data=feed.fingerprint)

    def _set_up(self, feed: Feed) -> bool:
        """Make everything ready for the first step of a stage that is begun or goes on; False if it was stopped."""
        if self.config.swa_start is not None and feed.is_stream and norm_layers(self.stepper.model):
            raise StatisticsNeedLength
        if self._autotuner is not None and not self._tune(self._autotuner, feed):
            return False
        if self._few_shapes:
            autotuner.plan_shapes(self.stepper, self.task, feed, self.progress, self._epochs_ahead(feed))
        remarks = self._follow(feed)
        self._introduce(feed, remarks)
        if self._probe is not None:
            self._probe.begin(self, feed)
        self._scalars.clear()  # what was logged by trials
        self.clock.lap("setup")
        return True

    def _tune(self, tuner: autotuner.Autotuner, feed: Feed) -> bool:
        """Choose the fastest way to compute a step, if that is not done, and set it up for a stage; False if the run
        was asked to stop before there was a choice."""
        stepper = self.stepper
        if stepper.precision.is_open:
            # A run that is resumed, but not with what it chose before: its optimizer goes on.
            carried = state.carried(stepper) if stepper.num_steps else None
            model = stepper.model
            tuned = tuner.choose(model, feed)
            if tuned is None:
                return False
            self._compute_in(tuner, tuned)
            stepper.release()
            self._prepare(model)
            if carried is not None:
                state.restore(stepper, *carried)
        epochs = self._epochs_ahead(feed)
        autotuner.record_shapes(stepper, self.task, feed, self.progress, epochs, self._scalars)
        self.session.keep_choice(None if self.choice is None else self.choice.record())
        return True

    def _epochs_ahead(self, feed: Feed) -> range:
        """Return the epochs that the stage has still to train; where nobody knows their number, enough."""
        position = self.position
        ahead = outlook(self.config, self.stages, self._began_stage, position, feed.num_steps(position.epoch))
        return range(position.epoch, max(position.epoch + 1, ahead.epochs or position.epoch + LOOKED_AT))

    def _compute_in(self, tuner: autotuner.Autotuner, tuned: autotuner.Tuned | None) -> None:
        """Settle the stepper on what the autotuner has chosen; None: nothing yet."""
        self.choice = None if tuned is None else tuned.choice
        self.stepper.settle(tuner.initial if tuned is None else tuned.precision)

    def _follow(self, feed: Feed) -> list[str]:
        """Let the stepper follow the learning rates; return what there is to tell of them."""
        rate = self._schedule(feed)
        if self._probe is None or self._probe.schedule is None:
            say = self.progress.say
            remarks = setup.follow(self.stepper, self.task, rate, self.config, self._schedule_steps, say)
            if self.stepper.schedulers.waits_for_scores and not self._validates:
                remarks.append("learning rate: ReduceLROnPlateau moves it after validations, and there are none")
            return remarks
        self.stepper.follow(rate)
        return []

    @property
    def _validates(self) -> bool:
        """True if there are validations while training goes on."""
        return not self.validation.is_empty and bool(self.config.val_every_steps or self.config.val_every_epochs)

    def _schedule(self, feed: Feed) -> Callable[[int], float]:
        """Return the learning rate by step."""
        if self._probe is not None and self._probe.schedule is not None:
            self._schedule_steps = self.config.steps
            return self._probe.schedule
        self._schedule_steps = schedule_steps(self.config, self.stages, self._began_stage, feed, self._feed)
        scores = (lambda: self.position.scores) if self._validates else None
        rate = schedule.build(self.config, self._schedule_steps, scores)
        began, start, constant = self.position.schedule_began, self.config.swa_start, self.config.swa_lr
        if start is None or constant is None:
            return lambda step: rate(step - began)
        return lambda step: constant if step >= start else rate(step - began)

    def _info(self) -> RunInfo:
        settings = masked_values(self.config.model_dump(mode="json"))
        return RunInfo(
            type(self.task).__name__,
            self.config.out,
            settings,
            self.stepper.num_steps,
            self.link.world.size,
            self.ask_to_stop,
        )

    @property
    def _stage_name(self) -> str | None:
        """Name of the current stage, where there are several."""
        return self.stages[self._began_stage].name if len(self.stages) > 1 else None

    def _introduce(self, feed: Feed, more: Sequence[str]) -> None:
        """Describe the run before the first step of this launch; of later stages only their data."""
        data = summary.data_facts(feed, self.position.epoch, self.task.length_unit)
        if self._is_introduced:
            if self._stage_name is not None:
                self.progress.tell(f"stage {self._stage_name}: {summary.data_line(data)}")
            return
        self._is_introduced = True
        facts = summary.Facts(
            config=self.config,
            world=self.link.world,
            seats=self.link.gather_objects(summary.seat(self.link)),
            grains=self.resume.grains,
            precision=self.stepper.precision,
            data=data,
            model=summary.model_facts(self.stepper),
            validation=self.validation.sizes,
            schedule_steps=self._schedule_steps,
            stage=self._stage_name,
            folder=self.config.out,
            resumed=self._resumed,
            has_group=self.link.has_group,
            num_cores=len(os.sched_getaffinity(0)),
            task_rows=tasks.summary_rows_of(self.task),
            has_own_rates=bool(more),
        )
        self.progress.table(summary.rows(facts))
        arithmetic = [self.resume.arithmetic] if self.resume.arithmetic else []
        remarks = [
            *summary.room_for_more(facts.world),
            *summary.idle_ranks(facts),
            *summary.no_faster(facts),
            *summary.unequal_devices(facts.seats),
            *summary.idle(facts),
        ]
        if self._survival is not None:
            remarks.append(price(self.config))
        for line in [*arithmetic, *self.stepper.precision.notes, *more, *remarks]:
            self.progress.say(line)

    # -- the way out ---------------------------------------------------------------------------------------------

    def _close(self, status: str) -> Result:
        self.stepper.sync()
        self.stepper.prepared.statistics.total()
        trail.doing = SAVING
        self.checkpoints.close()
        self.session.close(status)
        self.clock.lap("checkpoint")
        self.timeline.close()
        self.log.close(status)
        self.clock.lap("logging")
        is_delivered = self.session.deliver()
        self.clock.lap("checkpoint")
        for line in autotuner.closing_lines(self.stepper) if self._autotuner is not None else []:
            self.progress.say(line)
        if status == "stopped":
            why = stop_reason(self.link)
            self.progress.say(f"{why}: saved after step {self.position.num_steps}; `--resume auto` goes on")
        self.link.barrier()
        self.clock.lap("communication")
        last, best = self.link.broadcast_object(self.checkpoints.ends())
        return Result(
            status,
            self.stepper.num_steps,
            self.log.loss,
            dict(self.validation.metrics),
            best_score(self.config, self.position),
            self.clock.read(),
            self.log.findings,
            self.config.mode,
            folder=self.config.out,
            checkpoint=last,
            best=best,
            address=self.session.address,
            is_delivered=is_delivered,
        )

    def give_model(self) -> torch.nn.Module:
        """Return the trained model as a plain one, in evaluation mode, when the run is over. All ranks must call it."""
        model = self.stepper.model
        self.stepper.release()
        return model.eval()


def _is_out_of_data(feed: Feed, step: Step) -> bool:
    """Return True if no rank has more data of unknown length, as the step's own reduction says."""
    return feed.is_stream and step.ranks_with_data is not None and not float(step.ranks_with_data)


def stage_steps(config: TrainConfig, stage: Stage, feed: Feed) -> int | None:
    """Return the number of steps of a stage, None if unknown.

    Where epochs differ in length (batches by cost), it is an estimate: see `Feed.total_steps`.
    """
    epochs = stage.epochs or config.epochs
    ends = [config.steps, None if epochs is None else feed.total_steps(epochs)]
    return min((end for end in ends if end is not None), default=None)


def schedule_steps(
    config: TrainConfig, stages: Sequence[Stage], number: int, feed: Feed, feed_of: Callable[[int, Stage], Feed]
) -> int | None:
    """Return the number of steps of the schedule that stage `number` follows, None if unknown.

    These are the stage's own, or those of all stages where no stage restarts the schedule.
    """
    steps = stage_steps(config, stages[number], feed)
    is_one_for_all = not any(stage.restart_schedule for stage in stages)
    if steps is None or len(stages) == 1 or not is_one_for_all or config.schedule == "constant":
        return steps
    for other, stage in enumerate(stages):
        if other != number:
            more = stage_steps(config, stage, feed_of(other, stage))
            if more is None:
                return None
            steps += more
    return steps
