"""A training run: opened, so that it begins or resumes where it was; moved from step to step; closed or undone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch

from paceline.config.settings import TrainConfig
from paceline.core.secrets import masked_values
from paceline.data.grain import Batch, Grain
from paceline.observe.callback import Callback, RunInfo
from paceline.observe.clock import Clock
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress
from paceline.observe.rank_log import rank_log
from paceline.observe.timeline.recorder import Timeline
from paceline.parallel.step import Step
from paceline.train import setup, summary
from paceline.train import task as tasks
from paceline.train.autotune import autotuner
from paceline.train.checkpoint import state
from paceline.train.checkpoint.checkpoints import Checkpoints
from paceline.train.checkpoint.contents import RunState, RunValues
from paceline.train.checkpoint.reader import Checkpoint
from paceline.train.checkpoint.session import RunSession
from paceline.train.divergence import LossWatch
from paceline.train.due import Outcome, best_score, is_multiple
from paceline.train.duties import Duty, Leave, Log, MeasureAverage, Moment, Save, Validate, come_together
from paceline.train.feed import DataChanged, Feed, StreamState
from paceline.train.logbook import Logbook, notes
from paceline.train.loss import TooManySkipped
from paceline.train.meter import Meter, make_clock
from paceline.train.position import Position
from paceline.train.probe import Probe
from paceline.train.result import Result
from paceline.train.resume import Resume
from paceline.train.scalars import Scalars, calls_log
from paceline.train.stage import Stages
from paceline.train.stepper import Stepper
from paceline.train.survival import Survival
from paceline.train.task import Surroundings, Task, overrides
from paceline.train.validate import Validation
from paceline.world.failure import stacks
from paceline.world.failure.board import EXIT_CRASH
from paceline.world.failure.flight_recorder import SAVING, trail
from paceline.world.failure.together import is_broken_link, log_if_lost
from paceline.world.link import Link
from paceline.world.signals import stop_reason


@dataclass(frozen=True)
class Hooks:
    """Hooks of a task around a step; None for those that it does not override."""

    before_step: Callable[[torch.nn.Module, Batch], None] | None
    after_backward: Callable[[], None] | None
    after_step: Callable[[torch.nn.Module, Step, list[Grain]], None] | None

    @classmethod
    def of(cls, task: Task, stepper: Stepper) -> Hooks:
        return cls(
            task.before_step if overrides(task, "before_step") else None,
            (lambda: task.after_backward(stepper.model)) if overrides(task, "after_backward") else None,
            task.after_step if overrides(task, "after_step") else None,
        )


@dataclass(kw_only=True, eq=False)
class Run:
    """An open training run: its position, and everything that training works with. `open_run` makes it.

    As a context manager it gives files and terminal back, and after an error records that the run has failed.
    """

    task: Task
    config: TrainConfig
    link: Link
    clock: Clock
    progress: Progress
    session: RunSession
    checkpoints: Checkpoints
    stepper: Stepper
    stages: Stages
    scalars: Scalars
    validation: Validation
    timeline: Timeline
    log: Logbook
    duties: Sequence[Duty]
    """What happens between steps, in this order."""
    position: Position
    survival: Survival | None
    is_kept: bool
    """False for a measurement: nothing of it is kept, and diverging does not end it."""
    resumed: str | None = None
    """Where the run was resumed, in words."""
    stream: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """State of data of unknown length at the position where the run was resumed."""
    next_due: int = 0
    """Number of steps at which the next duty is due."""
    is_asked_to_stop: bool = False
    """True if this process was asked to stop; steppers are also asked to when another process waits to join."""
    average: MeasureAverage = field(default_factory=MeasureAverage)
    hooks: Hooks = field(init=False)
    _since: Position = field(default_factory=Position)
    _feed: Feed | None = None
    _knows_stream: bool = True

    def __post_init__(self) -> None:
        self.hooks = Hooks.of(self.task, self.stepper)

    @property
    def resume(self) -> Resume:
        """How the run was resumed, and what that decided."""
        return self.session.resume

    @property
    def validates(self) -> bool:
        """True if there are validations during training."""
        return not self.validation.is_empty and bool(self.config.val_every_steps or self.config.val_every_epochs)

    # -- the position ------------------------------------------------------------------------------------------------

    def advance(self, batch: Batch, step: Step) -> None:
        """Move behind a batch that was trained on, and note its step."""
        self.position = self.position.advance(batch)
        self.log.note(step, batch)
        self.clock.lap("compute")

    def move(self, position: Position) -> None:
        """Continue at a position: of another epoch or stage, or with another score."""
        self.position = position

    def keep_first_loss(self) -> None:
        """Make the first loss of the stage, which divergence is judged by, part of the position."""
        self.position = replace(self.position, first_loss=self.log.losses.first_loss)

    def begin_stage(self, number: int) -> Feed:
        """Begin a stage, unless the run was resumed inside it, and open its data at the position."""
        if self.stages.began != number:
            self.position = self.stages.begin(number, self.position)
        feed = self._feed = self.stages.feed(number)
        self._knows_stream = True
        if self.position.data not in (None, feed.fingerprint) and not self.config.allow_change:
            raise DataChanged
        self.position = replace(self.position, data=feed.fingerprint)
        reread = feed.resume_stream(self.stream)
        self.stream = {}
        if reread is not None:
            self.progress.say(reread)
        return feed

    def batches(self, feed: Feed) -> Iterator[Batch]:
        """Return the batches from the position on; none if the run was saved at the very end of an epoch."""
        self._plan_duties()
        position = self.position
        if position.is_epoch_over:
            return iter(())
        return self.timeline.follow(feed.batches(position.epoch, position.step))

    # -- duties ------------------------------------------------------------------------------------------------------

    def attend(self, batch: Batch, step: Step) -> Outcome | None:
        """Attend to the duties that are due after a step. Return the reason to leave the epoch, None to continue."""
        regroups = self._waits_only_for_joiners(step)
        moment = self._moment(batch, step, regroups=regroups)
        due = [duty for duty in self.duties if duty.is_due(self.position, moment)]
        if not due:
            return None
        if any(duty.needs_sync(moment) for duty in due):
            come_together(self)
            # The average may have told of a stop or of the end of the data.
            moment = self._moment(batch, self.stepper.last_step or step, regroups=regroups)
        if self._is_stream:
            self.position = replace(self.position, is_epoch_over=moment.is_out_of_data or batch.is_last)
        for duty in self.duties:
            if duty.is_due(self.position, moment):  # again: the score of a validation may ask to save, or to leave
                outcome = duty.attend(self, moment)
                if outcome is not None:
                    return outcome
        self.clock.lap("other")
        if moment.is_ready:
            self._plan_duties()
        return None

    def _plan_duties(self) -> None:
        """Set when the next duty is due; with data of unknown length any step may be the last."""
        self._since = position = self.position
        self.next_due = 0 if self._is_stream else min(duty.next_due(position) for duty in self.duties)

    def _moment(self, batch: Batch, step: Step, *, regroups: bool) -> Moment:
        is_out_of_data = self._is_stream and step.ranks_with_data is not None and not float(step.ranks_with_data)
        return Moment.at(
            self.position,
            self._since,
            self.config,
            stop=self.is_stop_asked(step) and not regroups,
            regroups=regroups,
            is_together=self.stepper.is_together,
            is_out_of_data=is_out_of_data,
            is_last=batch.is_last,
            grains=batch.grains,
        )

    @property
    def _is_stream(self) -> bool:
        return self._feed is not None and self._feed.is_stream

    # -- stopping ----------------------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Save and leave soon: all ranks learn of it with the reduction of the next step."""
        if self.survival is not None and self.survival.is_cut_loose():
            os._exit(EXIT_CRASH)  # a signal of the system, not of the user: the others are not to stop because of it
        self.is_asked_to_stop = True
        self.stepper.ask_to_stop()

    def ask_to_regroup(self) -> None:
        """Leave the round soon, because another process waits to join; called in a thread."""
        self.stepper.ask_to_stop()

    def is_stop_asked(self, step: Step) -> bool:
        """Return True if any rank was asked to stop, as of the same step on all.

        On a GPU it is read at steps that are logged, where the device is waited for anyway.
        """
        if self.link.world.size == 1:
            return self.stepper.wants_stop
        if step.ranks_to_stop is None:
            return False  # ranks step apart, and learn of it with their next average
        on_host = step.ranks_to_stop.device.type == "cpu"
        return (on_host or is_multiple(self.stepper.num_steps, self.config.log_every)) and bool(step.ranks_to_stop)

    def _waits_only_for_joiners(self, step: Step) -> bool:
        """Return True if ranks were asked to stop, as of this step on all, and only because another process waits to
        join.

        Where no rank has the whole state, that is a stop like another: the run is saved.
        """
        if self.survival is None or not self.survival.has_copies or not self.is_stop_asked(step):
            return False
        return not self._is_stopped_by_user()

    def regroup_or(self, outcome: Outcome) -> Outcome:
        """Return how the loop ended: `REGROUP` where it was stopped only because another process waits to join."""
        if self.survival is None or outcome is not Outcome.STOPPED or self._is_stopped_by_user():
            return outcome
        return Outcome.REGROUP

    def _is_stopped_by_user(self) -> bool:
        """Return True if some rank was asked to stop. All ranks must call it."""
        return any(self.link.gather_objects(self.is_asked_to_stop))

    # -- the state ---------------------------------------------------------------------------------------------------

    def state(self) -> RunState:
        """Return what a checkpoint is made of."""
        epoch, step = self.position.epoch, self.position.step
        return RunState(
            self.stepper,
            self.position,
            self.task,
            self.log.so_far,
            self.session.choice,
            self.stages.few_shapes,
            lambda: self._stream_part(epoch, step),
        )

    def _stream_part(self, epoch: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the part of a checkpoint with the state of a stream, if it has one."""
        if self._feed is None or not self._knows_stream:
            return {}
        try:
            stream = self._feed.stream_state(epoch, step)
        except StreamState as error:  # no reason to lose a checkpoint
            self.progress.say(f"{error}: on resume, the stream will be read again from the start")
            self._knows_stream = False
            return {}
        return {"stream": stream} if stream else {}

    # -- the end -----------------------------------------------------------------------------------------------------

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Write the log file of this rank, with the error that ends the block."""
        with rank_log(self.session.rank_log_file, summary.rank_line(self.link)), log_if_lost(self.link.world):
            yield

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._abandon(error)
        finally:
            self.validation.close()
            self.log.end()  # whatever happens, the terminal is given back

    def _abandon(self, error: BaseException) -> None:
        if self.survival is not None and is_broken_link(error):
            self._suspend()
            return
        self.checkpoints.fail()
        self.session.fail("diverged" if isinstance(error, TooManySkipped) else "failed")
        self.timeline.abandon()

    def _suspend(self) -> None:
        """End this rank's part of a run that continues in another round."""
        self.log.suspend()
        self.checkpoints.suspend()
        self.session.suspend()
        self.timeline.abandon()

    def close(self, outcome: Outcome) -> Result:
        """End the run as its loop ended, and return its result."""
        if outcome is Outcome.REGROUP:
            self._suspend()
            return Result(outcome.status, self.stepper.num_steps, self.log.loss)
        status = outcome.status
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
        for line in autotuner.closing_lines(self.stepper) if self.stages.is_tuned else []:
            self.progress.say(line)
        if outcome is Outcome.STOPPED and self.is_kept:
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
            "train_eval" if self.config.validation else "train",
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


def open_run(
    task: Task,
    config: TrainConfig,
    link: Link,
    callbacks: Sequence[Callback] = (),
    *,
    probe: Probe | None = None,
    survival: Survival | None = None,
) -> Run:
    """Open a run on the ranks of a link, from the beginning or from where it was.

    It succeeds or undoes itself: after a failure no folder is locked or marked as running. A `probe` measures a run
    that keeps nothing; with `survival` a rank that is lost ends the round, not the run.
    """
    clock = make_clock(link.device)
    progress = Progress(link.is_first, config.progress, is_relayed=link.world.is_relayed)
    say = progress.say
    is_reopened = survival is not None and survival.round.number > 0
    tasks.check_ranks(task, config, link)  # before anything is written
    used = setup.plugins_of(task, config, link.world.launcher)
    session = RunSession(config, link, say, task.spec or type(task).__name__, plugins=used, is_reopened=is_reopened)
    config, grains = session.resume.config, session.resume.grains
    checkpoints = Checkpoints(session.resume, link, say, session.on_written)
    checkpoint = checkpoints.find_newest(None if survival is None else survival.memory.checkpoint())
    values = None if checkpoint is None else RunValues.of(checkpoint)
    stacks.send_to(session.rank_log_file)
    stepper = Stepper(config, link, clock=clock, norm_every=config.log_every if probe is None else None)
    few_shapes = setup.few_shapes(config, stepper.precision, link.device, values)
    scalars = Scalars(link, calls_log(type(task)), lambda: stepper.is_counted)
    task.attach(Surroundings(config, link, say, stepper.evaluating, few_shapes, scalars.add))
    stages = Stages(
        task,
        config,
        link,
        stepper,
        progress,
        clock,
        grains=grains,
        few_shapes=few_shapes,
        is_introduced=is_reopened,
        values=values,
        probe=probe,
    )
    position, stream, resumed = Position(), {}, None
    if checkpoint is not None and values is not None:
        position = _restore(checkpoint, values, task, stepper, stages)
        session.resume.check_precision(values.precision, stepper.precision.name)
        stream = {name: tensor.clone() for name, tensor in checkpoint.parts.get("stream", {}).items()}
        resumed = f"after step {position.num_steps} ({checkpoint.path.name})"
        if survival is None or survival.memory.step is None:
            say(f"resumed {resumed}")
    del checkpoint  # its tensors are mapped from files, and would keep them on disk
    validation = Validation(task, stepper, config, grains)
    timeline = Timeline(config, config.out, link, clock, lambda: stepper.num_steps, say)
    receivers = setup.callbacks(task, config, say, callbacks) if link.is_first else []
    meter = Meter(clock, stepper, task, config, None if values is None else values.so_far)
    with ExitStack() as undo:  # from here on there is something to undo: files, a lock, callbacks that have started
        session.open()
        undo.callback(session.fail)
        checkpoints.open()
        undo.callback(checkpoints.fail)
        if session.metrics_file is not None:
            done, validated = stepper.num_steps, max(0, position.validated)
            receivers.insert(0, Journal(session.metrics_file, next_step=done, next_validation=validated))
        log = Logbook(
            receivers,
            progress,
            stepper,
            lambda: run.position,
            meter,
            lambda: notes(stepper, stages.larc),
            LossWatch(config.max_loss_ratio, position.first_loss),
            scalars.read,
        )
        undo.callback(log.end)
        duties = [probe, Log(config), Validate(config), Save(config, link), Leave(config), survival]
        run = Run(
            task=task,
            config=config,
            link=link,
            clock=clock,
            progress=progress,
            session=session,
            checkpoints=checkpoints,
            stepper=stepper,
            stages=stages,
            scalars=scalars,
            validation=validation,
            timeline=timeline,
            log=log,
            duties=[duty for duty in duties if duty is not None],
            position=position,
            survival=survival,
            is_kept=probe is None,
            resumed=resumed,
            stream=stream,
        )
        settings = masked_values(config.model_dump(mode="json"))
        done, size = stepper.num_steps, link.world.size
        log.start(RunInfo(type(task).__name__, config.out, settings, done, size, run.ask_to_stop))
        if survival is not None:
            survival.open(run)
        undo.pop_all()
    clock.lap("setup")
    return run


def _restore(checkpoint: Checkpoint, values: RunValues, task: Task, stepper: Stepper, stages: Stages) -> Position:
    """Restore model, optimizer and task from a checkpoint, with the stages begun that had; return its position."""
    position = Position.load(values.position)
    tasks.check_saved(task, checkpoint.parts, position.num_begun_stages, len(stages.all))
    for number in range(position.num_begun_stages):
        stages.begin(number, Position())
    state.restore(stepper, checkpoint.parts, values.engine)
    tasks.load_state(task, dict(checkpoint.parts.get("task", {})))
    return position
