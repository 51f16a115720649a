"""The training loop. Read `Trainer.fit` and `engine.Engine.step` and you know how training works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from paceline.config.settings import TrainConfig
from paceline.core.keys import key
from paceline.observe.callback import RunInfo, Watcher
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress
from paceline.observe.rank_log import rank_log
from paceline.observe.records import Finding
from paceline.observe.timeline import recorder as timeline
from paceline.optim import build, larc, schedule
from paceline.parallel.step import Step
from paceline.train import setup, summary
from paceline.train import task as tasks
from paceline.train.autotune.autotuner import Autotuner
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint import state
from paceline.train.checkpoint.manager import CheckpointManager
from paceline.train.due import due_since, is_due, next_due
from paceline.train.engine import Engine
from paceline.train.feed import Feed, NothingRead
from paceline.train.fingerprint import DataChanged
from paceline.train.logbook import Logbook, notes
from paceline.train.meter import Meter, make_clock
from paceline.train.position import Position
from paceline.train.scaling import for_ranks
from paceline.train.signals import on_stop_signal, stop_reason
from paceline.train.task import Stage, Surroundings, Task, overrides
from paceline.train.validate import Validation
from paceline.world.failure import stacks
from paceline.world.failure.flight_recorder import trail
from paceline.world.failure.together import log_if_lost
from paceline.world.link import Link


@dataclass(frozen=True)
class Result:
    """Outcome of a run, in any mode."""

    status: str
    """`finished`, `early` (patience ran out) or `stopped` (a signal asked for it; `--resume auto` goes on); of the
    other modes `evaluated`, `predicted` or `measured`."""
    num_steps: int
    loss: float
    """Of the last step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last validation, as `set/metric`."""
    best: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went, by phase."""
    findings: tuple[Finding, ...] = ()
    """What held the run back, and what to type: the last word on each matter."""
    mode: str = "train_eval"
    """As in the settings, or `benchmark`."""
    predictions: Path | None = None
    """The file that mode `infer` wrote."""


class Trainer:
    """Trains a task on the ranks of a link, from the beginning or from where the run was."""

    def __init__(self, task: Task, config: TrainConfig, link: Link, watchers: Sequence[Watcher] = ()) -> None:
        self.clock = make_clock(link.device)
        config, self._arithmetic = for_ranks(config, link.world.size)
        self.task, self.config, self.link = task, config, link
        self.progress = Progress(link.is_first, config.progress, is_relayed=link.world.is_relayed)
        self.checkpoints = CheckpointManager(config, link, self.progress, task.spec or type(task).__name__)
        stacks.send_to(self.checkpoints.rank_log_file)
        self.engine = Engine(config, link=link, clock=self.clock)
        task.attach(Surroundings(config, link, self.progress.say, self.engine.evaluating))
        self.autotuner = Autotuner(task, config, self.engine, self.progress) if config.level == 4 else None
        if self.autotuner is not None and self.checkpoints.found is not None:
            self.autotuner.recall(self.checkpoints.found.state.get("choice"))
        self.position = Position()
        self.stages = list(tasks.stages_of(task))
        self._began_stage = -1
        self._build()
        self._resumed: str | None = None
        if self.checkpoints.found is not None:
            self._resume(self.checkpoints.found)
        self.validation = Validation(task, self.engine, config, self.checkpoints.grains)
        self.timeline = timeline.build(
            config, config.out, link, self.clock, lambda: self.engine.num_steps, self.progress.say
        )
        watching = setup.callbacks(task, config, self.progress.say, watchers) if link.is_first else []
        self.checkpoints.open()
        if self.checkpoints.metrics_file is not None:
            done, validated = self.engine.num_steps, max(0, self.position.validated)
            watching.insert(0, Journal(self.checkpoints.metrics_file, next_step=done, next_validation=validated))
        meter = Meter(self.clock, self.engine, task, config, self.checkpoints.so_far)
        self.log = Logbook(
            watching, self.progress, self.engine, self.position, meter, lambda: notes(self.engine, self.larc)
        )
        self.log.start(self._info())
        self._is_introduced = False
        self.clock.lap("setup")

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train to the end, to early stopping, or until asked to stop."""
        status = "finished"
        try:
            with rank_log(self.checkpoints.rank_log_file, summary.rank_line(self.link)):
                with on_stop_signal(self.engine.ask_to_stop), log_if_lost(self.link.world):
                    for number in range(self.position.stage, len(self.stages)):
                        status = self._train_stage(number)
                        if status == "stopped":
                            break
                return self._close(status)
        except BaseException:
            self.checkpoints.mark_failed()
            self.timeline.abandon()
            raise
        finally:
            self.log.end()  # whatever happens, the terminal is given back

    def _train_stage(self, number: int) -> str:
        stage, position = self.stages[number], self.position
        if self._began_stage != number:
            self._begin_stage(number)
        feed = self._feed(number, stage)
        if position.data not in (None, feed.fingerprint) and not self.config.allow_change:
            raise DataChanged
        position.data = feed.fingerprint
        epochs = stage.epochs or self.config.epochs
        if position.is_complete and (self._is_done(epochs) or self._lost_patience()):
            self.progress.say("this run is finished: nothing is left to train")
            return "early" if self._lost_patience() else "finished"
        position.is_complete = False  # or it goes on: a finished run was given more epochs, steps or patience
        self._make_fast(feed)
        self.engine.follow(self._schedule(feed))
        self._introduce(feed)
        self.clock.lap("setup")
        status = "finished"
        feed.end_epoch = epochs
        while status == "finished" and not self._is_done(epochs):
            status = self._train_epoch(feed)
            going_on = status == "finished" and not self._is_done(epochs)
            if going_on and (is_due(position.epoch, self.config.save_every_epochs) or self._found_best()):
                self._save()
        feed.close()
        if status != "stopped":
            with self.engine.whole_statistics():
                self.task.after_stage(self.engine.model, number)
            self.clock.lap("setup")
            position.is_complete = number + 1 == len(self.stages)
            if not position.is_complete:
                position.begin_stage(number + 1)
            self._save()
        return status

    def _make_fast(self, feed: Feed) -> None:
        """With `-O4`: find out what is fastest here, if that is not known, and set it up for a stage."""
        if self.autotuner is not None:
            self.autotuner.begin_stage(feed, self._prepare)
            self.checkpoints.keep_choice(None if self.autotuner.choice is None else self.autotuner.choice.record())

    def _train_epoch(self, feed: Feed) -> str:
        position, engine, config, clock = self.position, self.engine, self.config, self.clock
        first, looked = position.step, engine.num_steps
        self.log.begin_epoch(feed, summary.data_facts(feed, position.epoch), self._stage_name)
        wake = self._next_due()
        loss = partial(self.task.loss, engine.model)
        batch = None  # a run that was saved at the very end of an epoch goes on with none
        for batch in () if position.is_epoch_over else self.timeline.follow(feed.batches(position.epoch, first)):
            clock.begin_step()
            if self._before_step is not None:
                self._before_step(engine.model, batch)
            step = engine.step(loss, batch, self._after_backward)
            if self._after_step is not None:
                self._after_step(engine.model, step, batch.grains)
            position.step, position.num_steps = batch.step + 1, engine.num_steps
            self.log.note(step, batch)
            clock.lap("compute")
            stop = self._stop_asked(step)
            if engine.num_steps < wake and not stop and not feed.is_stream:
                continue  # nothing is due at most steps
            if not (engine.is_together or stop or self._is_done(None) or self._out_of_data(feed, step)):
                continue  # ranks step apart (`reduce: param`): what is due waits for their next average
            due, looked = partial(due_since, looked, engine.num_steps), engine.num_steps
            wake = self._next_due()
            if due(config.val_every_steps) or due(config.save_every_steps) or not engine.is_together:
                self._come_together()
                stop = stop or self._stop_asked(step)
            position.is_epoch_over = self._out_of_data(feed, step)
            if due(config.log_every):
                self.log.flush()
            if due(config.val_every_steps):
                self._validate()
            if stop or due(config.save_every_steps) or self._found_best():
                self._save()
            if stop:
                return "stopped"
            clock.lap("other")
            if self._is_done(None) or position.is_epoch_over or self._lost_patience():
                break
        if batch is None and first == 0 and not position.is_epoch_over:
            raise NothingRead(position.epoch)
        self._come_together()
        self.log.end_epoch(position.step - first)
        # Ended by `steps` or `patience`: if the run is given more of them, it goes on from here.
        is_cut_short = batch is not None and not batch.is_last and (self._is_done(None) or self._lost_patience())
        if not is_cut_short:
            position.epoch, position.step, position.is_epoch_over = position.epoch + 1, 0, False
        if is_cut_short or is_due(position.epoch, config.val_every_epochs):
            self._validate()
        tasks.report(self.task)
        return "early" if self._lost_patience() else "finished"

    def _come_together(self) -> None:
        self.clock.lap("other")
        self.engine.sync()
        self.clock.lap("communication")

    def _validate(self) -> None:
        if self.position.is_fresh:
            return  # due by steps and by epochs: one look at the same weights is enough
        self.clock.lap("other")
        trail.doing = "validating"
        self.log.flush()
        metrics = self.validation.run()
        if metrics:
            self.validation.judge(self.position)
            self.log.validation(metrics, self.validation.samples, self.validation.seconds)
        self.clock.lap("validation")

    def _save(self) -> None:
        self.clock.lap("other")
        trail.doing = "saving"
        self.log.flush()  # a step is written down before a checkpoint that contains it
        score = self.position.score if self.position.is_fresh else None
        self.checkpoints.save(self.engine, self.position, self.task, score, self.log.so_far)
        self.clock.lap("checkpoint")

    # -- when to end ---------------------------------------------------------------------------------------------

    def _is_done(self, epochs: int | None) -> bool:
        steps = self.config.steps
        if steps is not None and self.engine.num_steps - self.position.stage_began >= steps:
            return True
        return epochs is not None and self.position.epoch >= epochs

    def _next_due(self) -> int:
        return next_due(self.config, self.engine.num_steps, self.position.stage_began)

    def _lost_patience(self) -> bool:
        return self.config.patience is not None and self.position.bad_validations >= self.config.patience

    def _found_best(self) -> bool:
        """Whether the weights as they are now have just been found to be the best so far, and are to be kept."""
        is_best = self.position.score is not None and self.position.score == self.position.best
        return self.position.is_fresh and is_best and self.position.bad_validations == 0 and self.config.keep_best > 0

    def _out_of_data(self, feed: Feed, step: Step) -> bool:
        """Data of unknown length ends when no rank has more, which the step's own reduction says."""
        return feed.is_stream and step.ranks_with_data is not None and not float(step.ranks_with_data)

    def _stop_asked(self, step: Step) -> bool:
        """Whether any rank was asked to stop, as of the same step on all. On a GPU it is read when logging anyway."""
        if self.link.world.size == 1:
            return self.engine.wants_stop
        if step.ranks_to_stop is None:
            return False  # ranks step apart, and learn of it with their next average
        on_host = step.ranks_to_stop.device.type == "cpu"
        return (on_host or is_due(self.engine.num_steps, self.config.log_every)) and bool(step.ranks_to_stop)

    def _close(self, status: str) -> Result:
        self.engine.sync()
        self.engine.statistics.total()
        self.checkpoints.close(status)
        self.clock.lap("checkpoint")
        self.timeline.close()
        self.log.close(status)
        self.clock.lap("logging")
        for line in [] if self.autotuner is None else self.autotuner.lines():
            self.progress.say(line)
        if status == "stopped":
            why = stop_reason(self.link)
            self.progress.say(f"{why}: saved after step {self.position.num_steps}; `--resume auto` goes on")
        self.link.barrier()
        self.clock.lap("communication")
        return Result(
            status,
            self.engine.num_steps,
            self.log.loss,
            dict(self.validation.metrics),
            self.position.best,
            self.clock.read(),
            self.log.findings,
            self.config.mode,
        )

    # -- the way in ----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        torch.manual_seed(self.config.seed)
        model = self.task.model()
        build.freeze(model, self.config.freeze)
        if self.checkpoints.found is None:
            setup.load_weights(model, self.task, self.config.init_from, self.progress.say)
        self._prepare(model)
        self._after_backward: Callable[[], None] | None = None
        if overrides(self.task, "after_backward"):
            self._after_backward = lambda: self.task.after_backward(self.engine.model)
        self._before_step = self.task.before_step if overrides(self.task, "before_step") else None
        self._after_step = self.task.after_step if overrides(self.task, "after_step") else None

    def _prepare(self, model: torch.nn.Module) -> None:
        model.to(self.link.device)
        if self.autotuner is not None:
            self.autotuner.accelerate(model)
        optimizer = self.task.optimizer(build.groups(model, self.config), self.config, self.link.device)
        self.larc = larc.attach(optimizer, self.config)
        self.engine.prepare(model, optimizer)

    def _resume(self, found: restore.Checkpoint) -> None:
        position = Position(**found.state["position"])
        # A checkpoint from the end of a stage is of a model for which the next stage has not begun.
        is_begun = position.epoch > 0 or position.step > 0
        for number in range(position.stage + is_begun):
            self._begin_stage(number)
        self.position = position
        state.restore(self.engine, found.parts, found.state["engine"])
        tasks.load_state(self.task, dict(found.parts.get("task", {})))
        self.checkpoints.check_precision(self.engine.precision.name)
        self.checkpoints.found = None  # what is mapped from its files would keep them on disk
        self._resumed = f"after step {position.num_steps} ({found.path.name})"
        self.progress.say(f"resumed {self._resumed}")

    def _begin_stage(self, number: int) -> None:
        """Optimizer and schedule start anew where the stage says so; a model that changed shape is prepared again."""
        stage, model = self.stages[number], self.engine.model
        torch.manual_seed(key(self.config.seed, number))  # for layers that a task adds
        before = build.signature(model)
        with self.engine.whole_statistics():
            self.task.before_stage(model, number)
        changed = before != build.signature(model)
        if changed or (stage.restart_optimizer and number > 0):
            self.engine.release()
            self._prepare(model)
        if changed and not stage.restart_optimizer and number > 0:
            self.progress.say(f"stage {stage.name!r} changed the model: the optimizer starts anew")
        if changed and self.engine.precision.compile:
            self.progress.say(f"stage {stage.name!r} changed the model: it is compiled again")
        self.position.stage_began = self.engine.num_steps
        if stage.restart_schedule or number == 0:
            self.position.schedule_began = self.engine.num_steps
            self.position.scores = []
        self._began_stage = number

    def _feed(self, number: int, stage: Stage) -> Feed:
        data = stage.data() if callable(stage.data) else stage.data
        config = self.config
        feed = Feed(
            data,
            config,
            self.link,
            grains=self.checkpoints.grains,
            seed=config.seed if number == 0 else key(config.seed, number),
            collate=tasks.train_collate_of(self.task, data),
            lengths=tasks.lengths_of(self.task, data),
            counts=tasks.counts_of(self.task, data),
            clock=self.clock,
        )
        if not feed.is_stream and config.batch_cost is None and len(data) < config.max_samples:
            self.progress.say(f"the batch of {config.max_samples} is larger than the data: one step of {len(data)}")
        return feed

    def _schedule(self, feed: Feed) -> Callable[[int], float]:
        """The learning rate by step."""
        self._schedule_steps = schedule_steps(self.config, self.stages, self._began_stage, feed, self._feed)
        looks = not self.validation.is_empty and (self.config.val_every_steps or self.config.val_every_epochs)
        rate = schedule.build(self.config, self._schedule_steps, self.position.scores if looks else None)
        began = self.position.schedule_began
        return lambda step: rate(step - began)

    def _info(self) -> RunInfo:
        settings = self.config.model_dump(mode="json")
        return RunInfo(type(self.task).__name__, self.config.out, settings, self.engine.num_steps, self.link.world.size)

    @property
    def _stage_name(self) -> str | None:
        return self.stages[self._began_stage].name if len(self.stages) > 1 else None

    def _introduce(self, feed: Feed) -> None:
        """What this run is, before the first step of this launch; of later stages only their data."""
        data = summary.data_facts(feed, self.position.epoch, self.task.length_unit)
        if self._is_introduced:
            self.progress.tell(f"stage {self._stage_name}: {summary.data_line(data)}")
            return
        self._is_introduced = True
        facts = summary.Facts(
            config=self.config,
            world=self.link.world,
            seats=self.link.gather_objects(summary.seat(self.link)),
            grains=self.checkpoints.grains,
            precision=self.engine.precision,
            data=data,
            model=summary.model_facts(self.engine),
            validation=self.validation.sizes,
            schedule_steps=self._schedule_steps,
            stage=self._stage_name,
            folder=self.config.out,
            resumed=self._resumed,
            has_group=self.link.has_group,
        )
        self.progress.table(summary.rows(facts))
        for line in [*filter(None, [self._arithmetic]), *self.engine.precision.notes, *summary.idle(facts)]:
            self.progress.say(line)


def stage_steps(config: TrainConfig, stage: Stage, feed: Feed) -> int | None:
    """Steps of a stage, None if nobody knows. Where epochs differ in length (batches by cost), the first one stands
    for all."""
    epochs = stage.epochs or config.epochs
    per_epoch = None if epochs is None else feed.num_steps(0)
    ends = [config.steps, per_epoch and epochs and per_epoch * epochs]
    return min((end for end in ends if end is not None), default=None)


def schedule_steps(
    config: TrainConfig, stages: Sequence[Stage], number: int, feed: Feed, feed_of: Callable[[int, Stage], Feed]
) -> int | None:
    """Steps of the schedule that stage `number` follows: its own, or of all stages where no stage begins it anew."""
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
