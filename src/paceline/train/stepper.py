"""Stepper: one training step, the same on any number of ranks.

It owns autocast, backward, loss scaling, reduction, clipping, the update and the schedule; the caller owns the loop.
Nothing in a step waits for the device: numbers for the host are read when something is logged.

A stepper is constructed, prepared (`prepare` gives it a model and an optimizer) and stepped. `release` gives the model
back, so that it can be prepared again with another shape, optimizer or precision (`settle`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.config.python_call import kind_of
from paceline.config.settings import EngineConfig
from paceline.core.errors import Failed, PacelineError, WrongType, first_line
from paceline.core.torch_private import backward, compile_counters, plain_step
from paceline.core.units import counted
from paceline.data.grain import Batch, Grain, map_tensors
from paceline.observe.clock import Clock
from paceline.optim.clip import ClipNorm
from paceline.optim.ema import WeightAverage
from paceline.parallel.step import Average, GrainNumbers, RankNumbers, Step, Tally
from paceline.speed import loss_scale, precision
from paceline.speed.graphs import Graphs, Recorder
from paceline.train.grains import Loss, RecordedPass
from paceline.train.loss import NoGradients, NonFiniteLoss, OutOfMemory, SkipCount
from paceline.train.prepare import Prepared, prepare
from paceline.train.randomness import GrainRandomness
from paceline.train.rates import STEPPED, Rates, Schedulers
from paceline.train.scalars import Scalars
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link


class NotPrepared(PacelineError):
    """The engine has no model yet, or has given it back."""

    sentence = "the engine has no model"
    hint = "call `engine.prepare(model, optimizer)` first"


class EngineClosed(PacelineError):
    """An engine that is to work after its ranks have parted."""

    call: str
    sentence = "engine.{call} was called after the ranks have parted: the engine that the link is of was closed"
    hint = (
        "close engines after their last step, the one that the link was taken from last; `with` does it in that order"
    )


class Stepper:
    """One training step of a model on the ranks of a link, and what happens to the model between steps."""

    def __init__(
        self, config: EngineConfig, link: Link, *, clock: Clock | None = None, norm_every: int | None = None
    ) -> None:
        """Measure the gradient norm every `norm_every` steps, where clipping does not need it anyway."""
        self.config, self.link, self.clock = config, link, clock
        self.device = link.device
        self.skips = SkipCount(self.device, config.max_skipped)
        self.num_steps = 0
        """Steps since the run began, those before a resume included."""
        self.rate: float | None = None
        """Learning rate of the last step: of the schedule, or of the first group without one."""
        self.last_step: Step | None = None
        """Record of the last step, completed by later averages of the ranks."""
        self.schedulers = Schedulers()
        """torch schedulers of the optimizer."""
        self.is_counted = True
        """False while grains run that do not belong to a training step: validation, trials."""
        self._rates = Rates()
        self._wants_stop = False
        self._norm_every = norm_every
        self._measure = ClipNorm(math.inf)
        self._listeners: list[Callable[[Average], None]] = []
        self._randomness = GrainRandomness(config.seed, self.device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=self.device)
        self._average: WeightAverage | None = None  # continues when the model is prepared again
        self._prepared: Prepared | None = None
        self.settle(precision.resolve(config.level, config.precision, precision.capabilities(self.device)))

    # -- setting up ----------------------------------------------------------------------------------------------

    def settle(self, chosen: precision.Precision) -> None:
        """Compute in this precision from now on; a model that is prepared already must be prepared again."""
        self.precision = chosen
        precision.apply(chosen)
        self.scale = loss_scale.build(self.config.loss_scale, chosen, self.device)

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float] | LRScheduler | None = None,
        *,
        beside: Sequence[torch.nn.Module] = (),
        shards: bool = True,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Prepare a model and its optimizer for training: see `Engine.prepare`, and `prepare` for `shards`."""
        self.check_open("prepare")
        self._prepared = prepare(
            model,
            optimizer,
            self.config,
            self.link,
            self.precision,
            self.scale,
            clock=self.clock,
            average=self._average,
            beside=beside,
            shards=shards,
        )
        self._average = self._prepared.average
        self._rates.begin(optimizer)
        self.schedulers.forget()
        if schedule is not None:
            self.follow(schedule)
        return model, optimizer

    @property
    def prepared(self) -> Prepared:
        """The model and its optimizer, with everything that a step needs of them."""
        if self._prepared is None:
            raise NotPrepared
        return self._prepared

    @property
    def model(self) -> torch.nn.Module:
        return self.prepared.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.prepared.optimizer

    def follow(
        self,
        schedule: Callable[[int], float] | LRScheduler,
        *,
        peak: float | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Set the learning rate of every step from now on to `schedule(step)`, or step a torch scheduler.

        With `peak`, the highest rate of the schedule, rates that others set are respected: see `Rates`.
        """
        if isinstance(schedule, LRScheduler):
            self.schedulers.add(STEPPED, schedule, self.optimizer)
        else:
            self._rates.follow(schedule, peak, tell)

    def record(
        self, recorder: Recorder, tensors: Callable[[Grain], Any], logged: Scalars | None = None
    ) -> RecordedPass:
        """Replay CUDA graphs of grains from now on, where their shape has one; `tensors` gives a grain's inputs, and
        `logged` takes what a loss logs."""
        prepared = self.prepared
        graphs = Graphs(prepared.model, recorder, prepared.strategy.gradient_groups())
        recorded = RecordedPass(graphs, tensors, prepared.plain, prepared.strategy, logged)
        self._prepared = replace(prepared, grains=recorded, recorded=recorded)
        return recorded

    def resume_at(self, num_steps: int) -> None:
        """Count the next step as the one after `num_steps`."""
        self.num_steps = num_steps

    def release(self) -> None:
        """Give the model back, so that it can be prepared again with another shape or optimizer."""
        prepared = self.prepared
        self.sync()
        prepared.statistics.total()
        prepared.release()
        self._prepared = None

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, loss: Loss, batch: Batch, after_backward: Callable[[], None] | None = None) -> Step:
        """Forward and backward over this rank's grains, one reduction over the ranks, one update.

        With `reduce: param` the update is this rank's own, and ranks are averaged every so many steps.
        """
        prepared, number = self.prepared, self.num_steps
        if not isinstance(batch, Batch):
            raise WrongType(
                f"engine.step got a batch {kind_of(batch)}, which has no grains",
                hint="take batches from `engine.batches(data, global_batch=64)`, where `data` may also be a DataLoader",
            )
        self.check_open("step")
        strategy = prepared.strategy
        trail.doing, trail.step = prepared.grains.doing, number
        self.rate = self._rates.set(prepared.optimizer, number)
        if not self.scale.is_found and strategy.updates(batch):
            self.scale.find(lambda: self._overflows(prepared, loss, _copied(batch)))
        tally, outputs = self._gradients(prepared, loss, batch)
        gradient_norm = None
        if strategy.updates(batch):
            if number == 0 and not math.isfinite(tally.loss):
                raise NonFiniteLoss(tally.loss, batch.grains[0].shapes() if batch.grains else "none on this rank")
            # Where the norm is needed anyway, and the host may read it, it also tells whether gradients are finite.
            tells = prepared.clip_norm is not None and after_backward is None and self.device.type == "cpu"
            gradients = self._check_gradients(prepared, tally, strategy.divisor(batch), norm_tells=tells)
            if after_backward is not None:
                gradients = self._show_gradients(prepared, after_backward)
            gradient_norm = self._clip(prepared, gradients, norm_tells=tells)
            self._update(prepared)
            self._lap("optimizer")
        self.schedulers.step()
        self.num_steps = number + 1
        step = strategy.finish(Step(number, *tally, gradient_norm, outputs))
        self.last_step = step
        if step.average is not None:
            self._tell(step.average)
        return step

    def _gradients(self, prepared: Prepared, loss: Loss, batch: Batch) -> tuple[Tally, list[Any]]:
        """Run this rank's grains and reduce: gradients and tally of the step, and the outputs of the grains."""
        try:
            prepared.begin_step(batch)
            numbers, outputs = self._run_grains(prepared, loss, batch)
            self._lap("compute")
            tally, statistics = prepared.strategy.reduce(numbers)
            prepared.statistics.finish_step(statistics)
            return tally, outputs
        except torch.AcceleratorError as error:
            if prepared.recorded is None:
                raise
            ranks = counted(self.link.world.size, "rank")
            raise Failed(
                f"the device failed in a step that is replayed from CUDA graphs ({ranks}): {first_line(error)}",
                hint="resume with `--no-cuda-graphs`, the same steps without graphs: if that trains, graphs are at "
                "fault on this machine; if it fails, too, `CUDA_LAUNCH_BLOCKING=1` shows where",
            ) from error

    def _overflows(self, prepared: Prepared, loss: Loss, batch: Batch) -> bool:
        """Return True if the step's gradients are not finite with the loss scale of the moment; the same on all ranks
        that share them. Waits for the device, and leaves no trace: the step is run again from the same state."""
        with prepared.untraced(), self._uncounted():
            tally, _ = self._gradients(prepared, loss, batch)
            self._check_gradients(prepared, tally, prepared.strategy.divisor(batch), norm_tells=False)
            return bool(self._found_inf.item())

    def _run_grains(self, prepared: Prepared, loss: Loss, batch: Batch) -> tuple[RankNumbers, list[Any]]:
        """Add up the gradients of this rank's grains, and return their losses and counts, and their outputs."""
        strategy, statistics, grains = prepared.strategy, prepared.statistics, prepared.grains
        randomness = self._randomness
        randomness.begin_step(self.num_steps)
        makeup = strategy.makeup(batch.grains)
        last = batch.grains[-1] if batch.grains and not makeup else None
        numbers: list[GrainNumbers] = []
        outputs: list[Any] = []
        grain: Grain | None = None
        try:
            for grain in batch.grains:
                randomness.before_grain(grain.number)
                statistics.before_grain(grain.number)
                total, grain_count, grain_outputs = grains.forward(loss, grain)
                randomness.after_forward()
                outputs.append(grain_outputs)
                if grain is last:
                    strategy.last_backward()
                grains.backward(total)
                numbers.append(GrainNumbers(total.detach(), grain_count, statistics.after_grain()))
                strategy.end_grain()
            if makeup:
                grain = makeup[0]
                with self._uncounted():
                    _run_makeup(prepared, loss, makeup)
        except torch.OutOfMemoryError as error:
            assert grain is not None
            raise OutOfMemory(grain.shapes(), len(grain), batch.num_grains, str(error)) from error
        statistics.end_step(batch.num_grains)
        return RankNumbers(numbers, batch.has_next, self._wants_stop), outputs

    def _check_gradients(self, prepared: Prepared, tally: Tally, divisor: float, *, norm_tells: bool) -> list[Tensor]:
        """Take the loss scale off, correct the divisor where the true count was not known, look for inf and nan.

        Without a loss scale, and where the norm tells, `_clip` looks instead.
        """
        if prepared.masters is not None:
            prepared.masters.pull_gradients()
        gradients = prepared.gradients()
        if not gradients:
            raise NoGradients
        on_host = not isinstance(tally.count, Tensor) or tally.count.device.type == "cpu"
        if not on_host or float(tally.count) != divisor:
            # Where nothing was counted this gives inf or nan, and the step is skipped.
            ratio = divisor / torch.as_tensor(tally.count, dtype=torch.float64, device=self.device)
            loss_scale.multiply(gradients, ratio)
        self._found_inf.zero_()
        if self.precision.scaled or not norm_tells:
            self._look_for_inf(prepared, gradients)
        return gradients

    def _look_for_inf(self, prepared: Prepared, gradients: list[Tensor]) -> None:
        """Take the loss scale off, and note for all ranks if a gradient is not finite."""
        if self.precision.scaled or not prepared.finite.find_inf(gradients, self._found_inf):
            self.scale.unscale_and_check(gradients, self._found_inf)
        for number in (self._found_inf, *self.scale.observed()):
            prepared.strategy.agree(number)

    def _show_gradients(self, prepared: Prepared, after_backward: Callable[[], None]) -> list[Tensor]:
        """Let a task look at the model's gradients, and change them."""
        if prepared.masters is not None:
            prepared.masters.push_gradients()
        self._lap("optimizer")
        after_backward()
        self._lap("compute")
        if prepared.masters is not None:
            prepared.masters.pull_changes()
        prepared.strategy.pull_gradients()
        return prepared.gradients()

    def _clip(self, prepared: Prepared, gradients: list[Tensor], *, norm_tells: bool) -> Tensor | None:
        """Clip the gradients as the settings say; return their norm, if that was needed."""
        if prepared.clip_norm is not None:
            norm = prepared.strategy.total_norm(gradients, prepared.clip_norm.norm)
            # A norm may overflow although all gradients are finite; all ranks have the same one.
            if norm_tells and not self.precision.scaled and not math.isfinite(norm):
                self._look_for_inf(prepared, gradients)
            prepared.clip_norm.scale(prepared.updated, norm)
            return norm
        measured: Tensor | None = None
        if self._norm_every is not None and (self.num_steps + 1) % self._norm_every == 0:
            measured = prepared.strategy.total_norm(gradients, self._measure.norm)
        if self.config.clip_value is not None:
            torch.nn.utils.clip_grad_value_(prepared.updated, self.config.clip_value)
        return measured

    def _update(self, prepared: Prepared) -> None:
        """Update unless gradients were not finite; on a GPU the optimizer itself looks, and the host does not wait."""
        optimizer = prepared.optimizer
        if prepared.skips_on_device:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
            plain_step(optimizer)
            self.skips.note_on_device(self._found_inf)
        else:
            is_skipped = bool(self._found_inf.item())
            if not is_skipped:
                plain_step(optimizer)
            self.skips.note(is_skipped, self.num_steps)
        if self.precision.scaled:
            self.scale.update(self._found_inf)
        if prepared.masters is not None:
            prepared.masters.push_weights()
        if prepared.average is not None:
            prepared.average.update(self.num_steps + 1)

    def _lap(self, phase: str) -> None:
        if self.clock is not None:
            self.clock.lap(phase)

    # -- between steps -------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """With `reduce: param`: average now, so that all ranks have the same model. All ranks must call it."""
        average = self.prepared.strategy.sync()
        if average is None:
            return
        if self.last_step is not None:
            self.last_step = replace(
                self.last_step, ranks_with_data=average.ranks_with_data, ranks_to_stop=average.ranks_to_stop
            )
        self._tell(average)

    @property
    def is_together(self) -> bool:
        """True if looking at the model now needs no further average: see `Strategy.is_together`."""
        return self.prepared.strategy.is_together

    def on_average(self, listener: Callable[[Average], None]) -> None:
        """Call `listener` with every average of the ranks' models, which completes the records of earlier steps."""
        self._listeners.append(listener)

    def _tell(self, average: Average) -> None:
        for listener in self._listeners:
            listener(average)

    def ask_to_stop(self) -> None:
        """Tell all ranks with the next reduction that this one was asked to stop; safe in a signal handler."""
        self._wants_stop = True

    @property
    def wants_stop(self) -> bool:
        """True if this rank was asked to stop."""
        return self._wants_stop

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode with complete statistics (and averaged weights); all ranks must enter."""
        prepared = self.prepared
        model, average = prepared.model, prepared.average
        weights = model if prepared.shards is None else prepared.shards.tensors
        with self.whole_statistics(), self._uncounted():
            training = [module for module in model.modules() if module.training]
            model.eval()
            averaged = nullcontext() if average is None else average.swapped(weights, dict(model.named_buffers()))
            try:
                with torch.no_grad(), prepared.autocast(), averaged, prepared.strategy.whole_weights():
                    yield
            finally:
                for module in training:
                    module.training = True

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        before, self.is_counted = self.is_counted, False
        try:
            yield
        finally:
            self.is_counted = before

    @contextmanager
    def whole_statistics(self) -> Iterator[None]:
        """Batch-norm statistics as one process would have them; all ranks must enter.

        With `reduce: param` the ranks are averaged first.
        """
        statistics = self.prepared.statistics
        self.sync()
        statistics.total()
        try:
            yield
        finally:
            statistics.share()

    def counters(self) -> dict[str, Any]:
        """Return numbers of compiled and recorded graphs, for the log; empty if neither is done."""
        numbers: dict[str, Any] = {}
        if self.precision.compile:
            numbers["compiled"] = compile_counters().graphs
        if self.recorded is not None:
            numbers["graphs"] = self.recorded.graphs.numbers()
        return numbers

    @property
    def recorded(self) -> RecordedPass | None:
        """CUDA graphs of grains, where `-O4` has chosen them."""
        return None if self._prepared is None else self._prepared.recorded

    def takes_end_of_data(self) -> bool:
        """Return True, once, if no rank has more data of unknown length, as the last reduction said.

        On several GPUs this waits for the device in every step; the end could be learned one step late from a copy.
        """
        step = self.last_step
        if self.link.world.size == 1 or step is None or step.ranks_with_data is None or float(step.ranks_with_data):
            return False
        self.last_step = None  # the next epoch has data again
        return True

    def finish(self) -> None:
        """Average ranks that step apart and complete batch-norm statistics, at the end of training."""
        if self._prepared is not None:
            self.check_open("close")
            self.sync()
            self._prepared.statistics.total()

    def check_open(self, call: str) -> None:
        """Raise `EngineClosed` if the ranks have parted."""
        if self.link.is_closed:
            raise EngineClosed(call)


def _copied(batch: Batch) -> Batch:
    """Return a batch with tensors of its own, for a loss that changes them in place (Mixup) and is tried before it
    counts."""
    grains = [Grain(map_tensors(torch.clone, grain.data), grain.number, grain.samples) for grain in batch.grains]
    return replace(batch, grains=grains)


def _run_makeup(prepared: Prepared, loss: Loss, grains: list[Grain]) -> None:
    """Run grains that other ranks have counted, so that all call the model equally often; they leave no trace."""
    with prepared.untraced():
        for number, grain in enumerate(grains, 1):
            total, _, _ = prepared.plain.forward(loss, grain)
            if number == len(grains):
                prepared.strategy.last_backward()
            backward(total, torch.zeros_like(total))
