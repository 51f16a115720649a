"""The training loop. Read `Trainer.fit` and `engine.Engine.step` and you know how training works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config.keys import key
from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.observe.clock import Clock, elapsed
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress
from paceline.optim import build, schedule
from paceline.speed import precision
from paceline.train import restore, state
from paceline.train.engine import Engine, Step
from paceline.train.feed import Feed
from paceline.train.keeper import Keeper
from paceline.train.logbook import Logbook
from paceline.train.position import Position
from paceline.train.signals import on_stop_signal
from paceline.train.task import Stage, Task, overrides
from paceline.train.validation import Validation
from paceline.world.link import Link


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    status: str
    """`finished`, `early` (patience ran out) or `stopped` (a signal asked for it; `--resume auto` goes on)."""
    num_steps: int
    loss: float
    """Of the last step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last validation, as `set/metric`."""
    best: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went, by phase."""


class Trainer:
    """Trains a task on the ranks of a link, from the beginning or from where the run was."""

    def __init__(self, task: Task, config: TrainConfig, link: Link) -> None:
        self.clock = Clock()
        self.task, self.config, self.link = task, config, link
        task.world = link.world
        self.progress = Progress(enabled=link.is_first)
        self.keeper = Keeper(config, link, self.progress, type(task).__name__)
        self.engine = Engine(config, link=link)
        self.engine.clock = self.clock
        self.position = Position()
        self.stages = list(task.stages())
        self._began_stage = -1
        self._build()
        if self.keeper.found is not None:
            self._resume(self.keeper.found)
        self.validation = Validation(task, self.engine, config, self.keeper.grains)
        self.keeper.open()
        journal = Journal(
            self.keeper.metrics_file, next_step=self.engine.num_steps, next_validation=max(0, self.position.validated)
        )
        self.log = Logbook(journal, self.progress, self.engine, self.position)
        self._introduce()
        self.clock.lap("setup")

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train to the end, to early stopping, or until asked to stop."""
        status = "finished"
        try:
            with on_stop_signal(self._ask_to_stop):
                for number in range(self.position.stage, len(self.stages)):
                    status = self._train_stage(number)
                    if status == "stopped":
                        break
            return self._close(status)
        except BaseException:
            self.keeper.mark_failed()
            raise
        finally:
            self.log.end()  # whatever happens, the terminal is given back

    def _train_stage(self, number: int) -> str:
        stage, position = self.stages[number], self.position
        if self._began_stage != number:
            self._begin_stage(number)
        feed = self._feed(number, stage)
        epochs = stage.epochs or self.config.epochs
        if position.is_complete and (self._is_done(epochs) or self._lost_patience()):
            self.progress.say("this run is finished: nothing is left to train")
            return "early" if self._lost_patience() else "finished"
        position.is_complete = False  # or it goes on: a finished run was given more epochs, steps or patience
        self.engine.schedule = self._schedule(feed, epochs)
        status = "finished"
        while status == "finished" and not self._is_done(epochs):
            status = self._train_epoch(feed)
            going_on = status == "finished" and not self._is_done(epochs)
            if going_on and (_due(position.epoch, self.config.save_every_epochs) or self._found_best()):
                self._save()
        feed.close()
        if status != "stopped":
            self.task.after_stage(self.engine.model, number)
            position.is_complete = number + 1 == len(self.stages)
            if not position.is_complete:
                position.stage, position.epoch, position.step, position.bad_validations = number + 1, 0, 0, 0
            self._save()
        return status

    def _train_epoch(self, feed: Feed) -> str:
        position, engine, config, clock = self.position, self.engine, self.config, self.clock
        before, first = clock.read(), position.step
        self.progress.epoch(position.epoch, feed.num_steps(position.epoch), first)
        clock.lap("setup")
        wake = self._next_due()
        batch = None  # a run that was saved at the very end of an epoch goes on with none
        for batch in feed.batches(position.epoch, first):
            clock.lap("data")
            step = engine.step(self._loss, batch, self._after_backward)
            if self._after_step is not None:
                self._after_step(engine.model, step, batch.grains)
            position.step, position.num_steps = batch.step + 1, engine.num_steps
            self.log.note(step)
            clock.lap("compute")
            stop = self._stop_asked(step)
            if engine.num_steps < wake and not stop and not feed.is_stream:
                continue  # nothing is due at most steps
            wake = self._next_due()
            if _due(engine.num_steps, config.log_every):
                self.log.flush()
            if _due(engine.num_steps, config.val_every_steps):
                self._validate()
            if stop or _due(engine.num_steps, config.save_every_steps) or self._found_best():
                self._save()
            if stop:
                return "stopped"
            clock.lap("other")
            if self._is_done(None) or self._out_of_data(feed, step) or self._lost_patience():
                break
        self.log.epoch(position.step - first, elapsed(before, clock.read()))
        # Ended by `steps` or `patience`: if the run is given more of them, it goes on from here.
        is_cut_short = batch is not None and not batch.is_last and (self._is_done(None) or self._lost_patience())
        if not is_cut_short:
            position.epoch, position.step = position.epoch + 1, 0
        if is_cut_short or _due(position.epoch, config.val_every_epochs):
            self._validate()
        return "early" if self._lost_patience() else "finished"

    def _validate(self) -> None:
        if self.position.is_fresh:
            return  # due by steps and by epochs: one look at the same weights is enough
        self.clock.lap("other")
        metrics = self.validation.run()
        if metrics:
            self.validation.judge(self.position)
            self.log.validation(metrics)
        self.clock.lap("validation")

    def _save(self) -> None:
        self.clock.lap("other")
        self.log.flush()  # a step is written down before a checkpoint that contains it
        self.keeper.save(self.engine, self.position, self.task, self.position.score if self.position.is_fresh else None)
        self.clock.lap("checkpoint")

    # -- when to end ---------------------------------------------------------------------------------------------

    def _is_done(self, epochs: int | None) -> bool:
        steps = self.config.steps
        if steps is not None and self.engine.num_steps - self.position.stage_began >= steps:
            return True
        return epochs is not None and self.position.epoch >= epochs

    def _next_due(self) -> int:
        """The first number of steps from here at which something is logged, validated, saved or ended."""
        config, now = self.config, self.engine.num_steps
        intervals = (config.log_every, config.val_every_steps, config.save_every_steps)
        due = [now - now % every + every for every in intervals if every is not None]
        return min(due if config.steps is None else [*due, self.position.stage_began + config.steps])

    def _lost_patience(self) -> bool:
        return self.config.patience is not None and self.position.bad_validations >= self.config.patience

    def _found_best(self) -> bool:
        """Whether the weights as they are now have just been found to be the best so far, and are to be kept."""
        return self.position.is_fresh and self.position.bad_validations == 0 and self.config.keep_best > 0

    def _out_of_data(self, feed: Feed, step: Step) -> bool:
        """Data of unknown length ends when no rank has more, which the step's own reduction says."""
        return feed.is_stream and step.ranks_with_data is not None and not float(step.ranks_with_data)

    def _ask_to_stop(self) -> None:
        self.engine.wants_stop = True

    def _stop_asked(self, step: Step) -> bool:
        """Whether any rank was asked to stop, as of the same step on all. On a GPU it is read when logging anyway."""
        if step.ranks_to_stop is None:
            return self.engine.wants_stop
        on_host = step.ranks_to_stop.device.type == "cpu"
        return (on_host or _due(self.engine.num_steps, self.config.log_every)) and bool(step.ranks_to_stop)

    def _close(self, status: str) -> Result:
        self.engine.statistics.total()
        self.keeper.close(status)
        self.clock.lap("checkpoint")
        self.log.close()
        if status == "stopped":
            self.progress.say(f"asked to stop: saved after step {self.position.num_steps}; `--resume auto` goes on")
        self.link.barrier()
        self.clock.lap("communication")
        return Result(
            status,
            self.engine.num_steps,
            self.log.loss,
            dict(self.validation.metrics),
            self.position.best,
            self.clock.read(),
        )

    # -- the way in ----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        torch.manual_seed(self.config.seed)
        model = self.task.model()
        build.freeze(model, self.config.freeze)
        if self.config.init_from is not None and self.keeper.found is None:
            loaded = restore.load_by_name(model, restore.load(self.config.init_from, ["model"]).parts["model"])
            new = [*loaded.missing, *loaded.mismatched]
            names = ": " + ", ".join(new[:5]) + (", ..." if len(new) > 5 else "") if new else ""
            self.progress.say(f"{len(loaded.loaded)} weights from {self.config.init_from}, {len(new)} new{names}")
        self._prepare(model)
        self._after_backward: Callable[[], None] | None = None
        if overrides(self.task, "after_backward"):
            self._after_backward = lambda: self.task.after_backward(self.engine.model)
        self._after_step = self.task.after_step if overrides(self.task, "after_step") else None

    def _prepare(self, model: torch.nn.Module) -> None:
        model.to(self.link.device)
        optimizer = self.task.optimizer(build.groups(model, self.config), self.config, self.link.device)
        self.engine.prepare(model, optimizer)

    def _loss(self, grain: Grain) -> Any:
        return self.task.loss(self.engine.model, grain)

    def _resume(self, found: restore.Checkpoint) -> None:
        position = Position(**found.state["position"])
        # A checkpoint from the end of a stage is of a model for which the next stage has not begun.
        is_begun = position.epoch > 0 or position.step > 0
        for number in range(position.stage + is_begun):
            self._begin_stage(number)
        self.position = position
        state.restore(self.engine, found.parts, found.state["engine"])
        self.task.load_state(dict(found.parts.get("task", {})))
        self.progress.say(f"resumed after step {position.num_steps} ({found.path.name})")

    def _begin_stage(self, number: int) -> None:
        """Optimizer and schedule start anew where the stage says so; a model that changed shape is prepared again."""
        stage, model = self.stages[number], self.engine.model
        torch.manual_seed(key(self.config.seed, number))  # for layers that a task adds
        before = _signature(model)
        self.task.before_stage(model, number)
        changed = before != _signature(model)
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
        self._began_stage = number

    def _feed(self, number: int, stage: Stage) -> Feed:
        data = stage.data() if callable(stage.data) else stage.data
        config = self.config
        feed = Feed(
            data,
            config,
            self.link,
            grains=self.keeper.grains,
            seed=config.seed if number == 0 else key(config.seed, number),
            collate=self.task.collate,
            lengths=self.task.lengths(data),
            counts=self.task.counts(data),
        )
        if not feed.is_stream and config.batch_cost is None and len(data) < config.max_samples:
            self.progress.say(f"the batch of {config.max_samples} is larger than the data: one step of {len(data)}")
        return feed

    def _schedule(self, feed: Feed, epochs: int | None) -> Callable[[int], float]:
        """The learning rate by step. Where epochs differ in length (batches by cost), the first one stands for all."""
        per_epoch = None if epochs is None else feed.num_steps(0)
        ends = [self.config.steps, per_epoch and epochs and per_epoch * epochs]
        steps = min((end for end in ends if end is not None), default=None)
        if steps is not None and not any(stage.restart_schedule for stage in self.stages):
            steps *= len(self.stages)  # one schedule for all
        rate = schedule.build(self.config, steps)
        began = self.position.schedule_began
        return lambda step: rate(step - began)

    def _introduce(self) -> None:
        """What this run is, before the first step."""
        size, grains = self.link.world.size, self.keeper.grains
        config, say = self.config, self.progress.say
        if config.out is not None:
            say(f"run folder {config.out}")
        whole = config.max_samples if config.batch_cost is None else config.batch_cost
        unit = "" if config.batch_cost is None else " (padded length)"
        ranks = f"{size} rank{'s' * (size > 1)} x {grains / size:g}"
        say(f"global batch {whole:g}{unit} = {grains} grain{'s' * (grains > 1)} of {whole / grains:g} = {ranks}")
        threads = f"{self.link.threads} thread{'s' * (self.link.threads > 1)} each"
        launcher = self.link.world.launcher
        started = "no launcher" if launcher == "plain" else f"launched by {launcher}"
        say(f"{self.link.device.type}, {threads}, {started}")
        self.progress.table(precision.rows(self.engine.precision))
        for note in self.engine.precision.notes:
            say(note)
        idle = [name for name in ("monitor", "patience") if getattr(config, name) is not None]
        if self.validation.is_empty and idle:
            say(f"without validation sets {' and '.join(f'`{name}`' for name in idle)} has no effect")


def _signature(model: torch.nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    """What an optimizer and a reduction are made for: which parameters of which shapes are trained."""
    return {name: (parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters()}


def _due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0
