"""Stages of a run: the model, the data, the way to compute and the learning rate of each, until its first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.config.settings import TrainConfig
from paceline.core.keys import key
from paceline.core.units import counted, plural
from paceline.data.torch_loader import take_out_for_training
from paceline.observe.clock import Clock
from paceline.observe.progress import Progress
from paceline.optim import build, schedule
from paceline.optim.larc import Larc
from paceline.speed import precision
from paceline.speed.autotune.choice import Choice
from paceline.train import setup, summary
from paceline.train import task as tasks
from paceline.train.autotune import autotuner
from paceline.train.checkpoint import state
from paceline.train.checkpoint.contents import RunValues
from paceline.train.feed import Feed, TrainingData
from paceline.train.norm_statistics import StatisticsNeedLength, norm_layers
from paceline.train.outlook import outlook
from paceline.train.position import Position
from paceline.train.prepare import sums_in_tree
from paceline.train.probe import Probe
from paceline.train.stepper import Stepper
from paceline.train.survival import price
from paceline.train.task import Stage, Task
from paceline.world.link import Link

if TYPE_CHECKING:
    from paceline.train.run import Run

EPOCHS_AHEAD = 1000
"""Epochs whose shapes are looked for where the length of a stage is unknown; the search itself ends long before."""


class Stages:
    """Stages of a task: builds the model, begins stages, opens their data, and makes them ready for the first step."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        link: Link,
        stepper: Stepper,
        progress: Progress,
        clock: Clock,
        *,
        grains: int,
        few_shapes: bool,
        is_introduced: bool,
        values: RunValues | None,
        probe: Probe | None,
    ) -> None:
        """`values` are those of the checkpoint that the run is resumed from. `is_introduced`: an earlier round of this
        launch has described the run."""
        self._task, self._config, self._link, self._stepper = task, config, link, stepper
        self._progress, self._clock, self._grains = progress, clock, grains
        self._rate = None if probe is None else probe.schedule
        self.few_shapes = few_shapes
        """True if batches should come in few shapes."""
        self.began = -1
        """Number of the stage that has begun."""
        self.data: object = None
        """Data of that stage, as the task gave it."""
        self.larc: Larc | None = None
        self.choice: Choice | None = None
        self._tuner: autotuner.Autotuner | None = None
        self._schedule_steps: int | None = None
        self._is_introduced = is_introduced
        self._choose_way(values)
        stages = list(tasks.stages_of(task))
        self.all = stages if probe is None else [replace(stages[0], epochs=None)]
        self._build(is_new=values is None)

    @property
    def name(self) -> str | None:
        """Name of the current stage, where there are several."""
        return self.all[self.began].name if len(self.all) > 1 else None

    @property
    def is_tuned(self) -> bool:
        """True if the way to compute a step is chosen by the autotuner."""
        return self._tuner is not None

    # -- the model ---------------------------------------------------------------------------------------------------

    def _choose_way(self, values: RunValues | None) -> None:
        """Decide whether the way to compute a step is chosen (`-O4`, `auto`), and recall what a resumed run chose."""
        record = None if values is None else values.choice
        # A run from before `auto` chose anything continues as it began.
        may_choose = values is None or record is not None or self._config.level == 4
        if may_choose and autotuner.is_asked(self._config, precision.capabilities(self._link.device)):
            stepper = self._stepper
            self._tuner = autotuner.Autotuner(
                self._task, self._config, self._link, self._progress, lambda: stepper.wants_stop
            )
            self._compute_in(self._tuner, None if record is None else self._tuner.recall(record))

    def _build(self, *, is_new: bool) -> None:
        """Build the model of the task and prepare it; a new run starts from the weights of `init_from`."""
        config = self._config
        torch.manual_seed(config.seed)
        model = self._task.model()
        build.freeze(model, config.freeze)
        if is_new:
            setup.load_weights(model, self._task, config.init_from, self._progress.say)
        self._prepare(model)

    def _prepare(self, model: torch.nn.Module) -> None:
        model.to(self._link.device)
        autotuner.put_kernels(self._task, model, self._stepper.precision, self._progress.say)
        self.larc = setup.prepare(self._stepper, self._task, self._config, model)

    def _compute_in(self, tuner: autotuner.Autotuner, tuned: autotuner.Tuned | None) -> None:
        """Settle the stepper on what the autotuner has chosen; None: nothing yet."""
        self.choice = None if tuned is None else tuned.choice
        self._stepper.settle(tuner.initial if tuned is None else tuned.precision)

    def begin(self, number: int, position: Position) -> Position:
        """Begin a stage and return its first position. Optimizer and schedule restart where the stage says so; a model
        that changed shape is prepared again."""
        stage, stepper, say = self.all[number], self._stepper, self._progress.say
        model = stepper.model
        before = build.signature(model)
        with stepper.whole_statistics():
            setup.begin_stage(self._task, self._config, model, number)
        changed = before != build.signature(model)
        if changed or (stage.restart_optimizer and number > 0):
            stepper.release()
            self._prepare(model)
        if changed and not stage.restart_optimizer and number > 0:
            say(f"stage {stage.name!r} changed the model: the optimizer starts anew")
        if changed and stepper.precision.compile:
            say(f"stage {stage.name!r} changed the model: it is compiled again")
        if stage.restart_schedule:
            stepper.schedulers.restart()
        self.began = number
        return position.begin_stage(restarts_schedule=stage.restart_schedule or number == 0)

    # -- the data ----------------------------------------------------------------------------------------------------

    def feed(self, number: int) -> Feed:
        """Open the training data of a stage."""
        stage, config, task, say = self.all[number], self._config, self._task, self._progress.say
        given = stage.data() if callable(stage.data) else stage.data
        if number == self.began:  # else a later one, whose steps are counted
            self.data = given
        source, lines = take_out_for_training(given, config)
        data = source.dataset
        collate, lengths = task.train_collate(data), tasks.lengths_of(task, data)
        for line in lines:
            say(line)
        feed = Feed(
            TrainingData(data, collate or source.collate, lengths, tasks.counts_of(task, data)),
            config,
            self._link,
            grains=self._grains,
            seed=config.seed if number == 0 else key(config.seed, number),
            clock=self._clock,
            in_blocks=sums_in_tree(config),
            end_epoch=stage.epochs or config.epochs,
        )
        if not feed.is_stream and config.batch_cost is None and len(data) < config.max_samples:
            say(f"the batch of {config.max_samples} is larger than the data: one step of {len(data)}")
        if config.batch_cost is not None and lengths is not None:
            longer = int((np.asarray(lengths) > config.batch_cost).sum())
            if longer:
                say(
                    f"{longer:,} of {counted(len(lengths), 'sample')} {plural(longer, 'is')} longer than the batch of "
                    f"{config.batch_cost:g} (`batch_cost`): a step of one sample each"
                )
        return feed

    # -- ready for the first step ------------------------------------------------------------------------------------

    def set_up(self, run: Run, feed: Feed) -> bool:
        """Make everything ready for the first step of a stage that begins or is resumed; False if it was stopped."""
        stepper = self._stepper
        if self._config.swa_start is not None and feed.is_stream and norm_layers(stepper.model):
            raise StatisticsNeedLength
        epochs = self._epochs_ahead(feed, run.position)
        if self._tuner is not None:
            if stepper.precision.is_open and not self._tune(self._tuner, feed):
                return False
            autotuner.record_shapes(stepper, self._task, feed, self._progress, epochs, run.scalars)
            run.session.keep_choice(None if self.choice is None else self.choice.record())
        if self.few_shapes:
            autotuner.plan_shapes(stepper, self._task, feed, self._progress, epochs)
        remarks = self.follow(run, feed)
        self._introduce(run, feed, remarks)
        for duty in run.duties:
            duty.begin(run, feed)
        run.scalars.clear()  # what was logged by trials
        self._clock.lap("setup")
        return True

    def _tune(self, tuner: autotuner.Autotuner, feed: Feed) -> bool:
        """Choose the fastest way to compute a step, and prepare the model for it; False if the run was asked to stop
        before there was a choice."""
        stepper = self._stepper
        # A run that is resumed, but not with what it chose before: its optimizer continues.
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
        return True

    def _epochs_ahead(self, feed: Feed, position: Position) -> range:
        """Return the remaining epochs of the stage, `EPOCHS_AHEAD` of them if their number is unknown."""
        ahead = outlook(self._config, self.all, self.began, position, feed.num_steps(position.epoch))
        return range(position.epoch, max(position.epoch + 1, ahead.epochs or position.epoch + EPOCHS_AHEAD))

    def follow(self, run: Run, feed: Feed) -> list[str]:
        """Let the stepper follow the learning rates of the stage; return remarks on them."""
        stepper, config = self._stepper, self._config
        if self._rate is not None:
            self._schedule_steps = config.steps
            stepper.follow(self._rate)
            return []
        num_steps = self._schedule_steps = schedule_steps(config, self.all, self.began, feed, self.feed)
        rate = self._schedule(run, num_steps)
        remarks = setup.follow(stepper, self._task, rate, config, num_steps, self._progress.say)
        if stepper.schedulers.waits_for_scores and not run.validates:
            remarks.append("learning rate: ReduceLROnPlateau moves it after validations, and there are none")
        return remarks

    def _schedule(self, run: Run, num_steps: int | None) -> Callable[[int], float]:
        """Return the learning rate by step, as the settings ask for."""
        config = self._config
        rate = schedule.build(config, num_steps, (lambda: run.position.scores) if run.validates else None)
        began, start, constant = run.position.schedule_began, config.swa_start, config.swa_lr
        if start is None or constant is None:
            return lambda step: rate(step - began)
        return lambda step: constant if step >= start else rate(step - began)

    def _introduce(self, run: Run, feed: Feed, remarks: Sequence[str]) -> None:
        """Describe the run before the first step of this launch; of later stages only their data."""
        stepper, say = self._stepper, self._progress.say
        data = summary.data_facts(feed, run.position.epoch, self._task.length_unit)
        if self._is_introduced:
            if self.name is not None:
                self._progress.tell(f"stage {self.name}: {summary.data_line(data)}")
            return
        self._is_introduced = True
        facts = summary.Facts(
            config=self._config,
            world=self._link.world,
            seats=self._link.gather_objects(summary.seat(self._link)),
            grains=self._grains,
            precision=stepper.precision,
            data=data,
            model=summary.model_facts(stepper),
            validation=run.validation.sizes,
            schedule_steps=self._schedule_steps,
            stage=self.name,
            folder=self._config.out,
            resumed=run.resumed,
            has_group=self._link.has_group,
            num_cores=len(os.sched_getaffinity(0)),
            task_rows=tasks.summary_rows_of(self._task),
            has_own_rates=bool(remarks),
        )
        self._progress.table(summary.rows(facts))
        lines = [
            *([run.resume.arithmetic] if run.resume.arithmetic else []),
            *stepper.precision.notes,
            *remarks,
            *summary.room_for_more(facts.world),
            *summary.idle_ranks(facts),
            *summary.no_faster(facts),
            *summary.unequal_devices(facts.seats),
            *summary.idle(facts),
            *([] if run.survival is None else [price(self._config)]),
        ]
        for line in lines:
            say(line)


def stage_steps(config: TrainConfig, stage: Stage, feed: Feed) -> int | None:
    """Return the number of steps of a stage, None if unknown.

    Where epochs differ in length (batches by cost), it is an estimate: see `Feed.total_steps`.
    """
    epochs = stage.epochs or config.epochs
    ends = [config.steps, None if epochs is None else feed.total_steps(epochs)]
    return min((end for end in ends if end is not None), default=None)


def schedule_steps(
    config: TrainConfig, stages: Sequence[Stage], number: int, feed: Feed, feed_of: Callable[[int], Feed]
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
            more = stage_steps(config, stage, feed_of(other))
            if more is None:
                return None
            steps += more
    return steps
