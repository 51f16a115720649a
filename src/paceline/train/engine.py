"""One training step, the same on any number of ranks.

The engine owns autocast, backward, loss scaling, reduction, clipping, the update and the schedule; the caller owns
the loop. Nothing in a step waits for the device: what must be known on the host is read when something is logged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.config.settings import DataSettings, EngineConfig
from paceline.core.keys import key
from paceline.core.torch_private import foreach_mul_, plain_step, takes_amp_scaling
from paceline.data.grain import Batch, Grain
from paceline.observe.clock import Clock
from paceline.optim.build import zero_first_momentum
from paceline.optim.clip import ClipNorm
from paceline.optim.ema import WeightAverage
from paceline.parallel.sharded import Shards, called_whole
from paceline.parallel.statistics import RunningStatistics
from paceline.parallel.step import Step
from paceline.parallel.strategy import Tally
from paceline.speed import loss_scale, master, precision, recompute
from paceline.speed.compile import compile_in_place
from paceline.speed.graphs import Graphs
from paceline.train import looking, own_loop, reduction
from paceline.train.autotune.recorded import RecordedGrains
from paceline.train.dice import Dice
from paceline.train.loss import NoGradients, NonFiniteLoss, OutOfMemory, check_pair, unpack
from paceline.train.skips import SkipCount
from paceline.world.discover.environment import discover
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link
from paceline.world.start import start

Loss = Callable[[Grain], Any]


class Engine:
    """Five verbs for a loop of your own: `prepare`, `batches`, `step`, `evaluating`, `close`."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        link: Link | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        self.config = config or EngineConfig(**settings)
        self._owns_link = link is None
        self.link = link or start(
            discover(os.environ),
            device=self.config.device,
            threads=self.config.threads,
            start_timeout_s=self.config.start_timeout_s,
            timeout_s=self.config.timeout_s,
        )
        self.device = self.link.device
        capabilities = precision.capabilities(self.device)
        self.settle(precision.resolve(self.config.level, self.config.precision, capabilities))
        self._dice = Dice()
        self._generators = [torch.default_generator]
        if self.device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[self.device.index or 0])
        self._found_inf = torch.zeros((), device=self.device)
        self.skips = SkipCount(self.device, self.config.max_skipped)
        self.num_steps = 0
        self.epoch, self.epoch_step, self.call_began = 0, 0, 0  # where `batches` is, and where its last call began
        self.is_resumed = False
        self.rate: float | None = None
        self.clock = clock
        self._wants_stop = False
        self.schedule: Callable[[int], float] | None = None
        self.average: WeightAverage | None = None
        self.masters: master.Masters | None = None
        self.shards: Shards | None = None
        self.recorded: RecordedGrains | None = None
        """CUDA graphs of grains, where `-O4` has chosen them."""
        self._input_cast: RemovableHandle | None = None

    def settle(self, chosen: precision.Precision) -> None:
        """Compute in this from now on; a model that is prepared already must be prepared again."""
        self.precision = chosen
        precision.apply(chosen)
        self.autocast = precision.autocast(chosen, self.device)
        self.scale = loss_scale.build(self.config.loss_scale, chosen, self.device)

    # -- setting up ----------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float] | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Put a model and its optimizer to work here. Both are changed in place and keep their names.

        The order matters: where (device), what is kept (recomputation), equal on all ranks, in which dtype, compiled,
        cut up, reduced.
        """
        check_pair(model, optimizer)
        model.to(self.device)
        self._norms = reduction.join_norms(model, self.config, self.link)
        if self.config.checkpoint_activations:
            recompute.recompute(model, self.config.checkpoint_activations)
        # Shards are pieces of one model already.
        for tensor in [*([] if self.shards is not None else model.parameters()), *model.buffers()]:
            self.link.broadcast(tensor.data)
        self.masters = master.cast(model, optimizer, self.precision)
        if self.precision.weights is not torch.float32 and self._input_cast is None:
            self._input_cast = master.cast_inputs(model, self.precision.weights)
        if self.precision.compile:
            compile_in_place(model, self.config.compile_mode)
        self.shards = reduction.shard_model(model, optimizer, self.config, self.link)
        self.model, self.optimizer = model, optimizer
        if schedule is not None:
            self.follow(schedule)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.config.ema:
            self.average = WeightAverage.following(self.average, self.named_weights(), self.config.ema)
        several = self.link.has_group
        self.averages = several and self.config.reduce == "param"
        self._ranks_with_data: Any = 1.0  # until a reduction says otherwise
        self._several = several and not self.averages
        self.strategy = reduction.choose(
            parameters, self.config, self.link, model, optimizer, self.average, self.masters, self.shards
        )
        self._clips = self.config.clip_norm is not None or self.config.clip_value is not None
        self._clip_norm = None if self.config.clip_norm is None else ClipNorm(self.config.clip_norm)
        self._updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults.get("fused"):
            zero_first_momentum(optimizer)
        self._skips_on_device = takes_amp_scaling(optimizer)
        self.statistics = RunningStatistics(model, self.link, are_shared_out=self._several)
        self.statistics.share()
        return model, optimizer

    def follow(self, schedule: Callable[[int], float]) -> None:
        """Set the learning rate of every step from now on to `schedule(step)`."""
        self.schedule = schedule

    def record(self, graphs: Graphs, tensors: Callable[[Grain], Any]) -> RecordedGrains:
        """Replay CUDA graphs of grains from now on, where their shape has one; `tensors` gives a grain's inputs."""
        self.recorded = RecordedGrains(graphs, tensors, self.forward)
        return self.recorded

    def resume_at(self, num_steps: int, batches: Sequence[int] | None = None) -> None:
        """Go on after `num_steps` steps; `batches` is (epoch, step, first epoch of the call) of `Engine.batches`."""
        self.num_steps = num_steps
        if batches is not None:
            self.epoch, self.epoch_step, self.call_began = batches
            self.is_resumed = True

    def ask_to_stop(self) -> None:
        """Tell all ranks with the next reduction that this one was asked to stop; safe in a signal handler."""
        self._wants_stop = True

    @property
    def wants_stop(self) -> bool:
        """True if this rank was asked to stop."""
        return self._wants_stop

    def release(self) -> None:
        """Let go of the prepared model, so that it can be prepared again with another shape or optimizer."""
        self.sync()
        self.statistics.total()
        self.strategy.detach()
        self.recorded = None
        if self._norms is not None:
            self._norms.detach()
        if self.masters is not None:
            self.masters.release()
            self.masters = None

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The weights by name, as the optimizer has them: fp32 masters or this rank's shards, where there are some."""
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        if self.masters is not None:
            weights.update(self.masters.tensors)
        if self.shards is not None:
            weights.update(self.shards.tensors)
        return weights

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, loss: Loss, batch: Batch, after_backward: Callable[[], None] | None = None) -> Step:
        """Forward and backward over this rank's grains, one reduction over the ranks, one update.

        With `reduce: param` the update is this rank's own, and the reduction comes every so many steps.
        """
        trail.doing, trail.step = "training", self.num_steps
        rate = self._set_learning_rate()
        self.strategy.start_step()
        if self.recorded is not None:
            self.recorded.start_step()
        done = self._run_grains(loss, batch)
        self._lap("compute")
        if batch.grains or not self.averages:  # a rank that steps apart and has nothing to learn from waits
            if done.number == 0:
                self._check_first(done, batch)
            self._check_gradients(done, batch)
            if after_backward is not None:
                self._show_gradients(after_backward)
            if self._clips:
                self._clip(done)
            self._update()
            self._lap("optimizer")
        self.num_steps += 1
        self.rate = rate
        if self.averages:
            self._come_together(done, batch)
        return done

    def _come_together(self, done: Step, batch: Batch) -> None:
        self.strategy.stepped(done, batch.count, batch.has_next, self.wants_stop, batch.is_last)
        if done.ranks_with_data is not None:
            self._ranks_with_data = done.ranks_with_data
        if self.clock is not None and self.strategy.is_together:
            self.clock.meet()
        self._lap("communication")

    def _lap(self, phase: str) -> None:
        if self.clock is not None:
            self.clock.lap(phase)

    def sync(self) -> None:
        """With `reduce: param`: average now, so that all ranks have the same model. All ranks must call it."""
        self.strategy.sync()

    @property
    def is_together(self) -> bool:
        """Whether looking at the model now needs no average that would not have been: see `Strategy.is_together`."""
        return self.strategy.is_together

    def _run_grains(self, loss: Loss, batch: Batch) -> Step:
        """Gradients of the sum of all grains' losses over the step's count, summed over the ranks."""
        divisor = self._divisor(batch)
        if self._norms is not None:
            self._norms.begin_step(batch.num_grains)
        loss_sum: Any = 0.0
        count: Any = 0
        outputs: list[Any] = []
        grain: Grain | None = None
        position = 0  # first grain number whose batch-norm update this rank has not accounted for
        missing = self.strategy.make_up(batch.grains)
        last = -1 if missing else len(batch.grains) - 1
        seed, dice_are_due = self.config.seed, self._dice.are_due(self.num_steps)
        try:
            for index, grain in enumerate(batch.grains):
                value = key(seed, self.num_steps, grain.number)
                for generator in self._generators:
                    generator.manual_seed(value)
                if dice_are_due:
                    self._dice.seed(value)
                if self._several:
                    self.statistics.before_grain(missed=grain.number - position)
                    position = grain.number + 1
                if self.recorded is not None:
                    total, weight, extra = self.recorded.run(loss, grain, partial(self.scale.seed, count=divisor))
                else:
                    total, weight, extra = self.forward(loss, grain)
                if dice_are_due:
                    self._dice.look(self.num_steps)
                loss_sum = total.detach() if index == 0 else loss_sum + total.detach()
                count = count + weight
                outputs.append(extra)
                if self._several and index == last:
                    self.strategy.arm((loss_sum, count, batch.has_next, self.wants_stop))
                if self.recorded is None:  # else it has run backward, too
                    torch.autograd.backward((total,), (self.scale.seed(total, divisor),))
                if self._several:
                    self.statistics.after_grain()
            if missing:
                grain = missing[0]
                self._take_part(loss, missing, (loss_sum, count, batch.has_next, self.wants_stop))
        except torch.OutOfMemoryError as error:
            assert grain is not None
            raise OutOfMemory(grain.shapes(), len(grain), batch.num_grains, str(error)) from error
        if not self._several:
            return Step(self.num_steps, loss_sum, count, outputs=outputs)
        if not batch.grains and not missing:
            self.strategy.arm((loss_sum, count, batch.has_next, self.wants_stop))
        self.statistics.end_step(missed=batch.num_grains - position)
        self._lap("compute")
        loss_sum, count, more, stop = self.strategy.reduce().unbind()
        if self.clock is not None:
            self.clock.meet()
        self._ranks_with_data = more
        return Step(self.num_steps, loss_sum, count, more, stop, outputs=outputs)

    def _take_part(self, loss: Loss, grains: list[Grain], tally: Tally) -> None:
        """Run grains that other ranks have counted, so that all call the model equally often; nothing comes of it."""
        buffers = list(self.model.buffers())
        kept = [buffer.clone() for buffer in buffers]
        for number, grain in enumerate(grains, 1):
            total, _, _ = self.forward(loss, grain)
            if number == len(grains):
                self.strategy.arm(tally)
            torch.autograd.backward((total,), (torch.zeros_like(total),))
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)

    def _divisor(self, batch: Batch) -> float:
        """What is known of the step's count before its first backward: of all ranks, or of this one if alone."""
        return (batch.own_count if self.averages else batch.count) or 1

    def forward(self, loss: Loss, grain: Grain) -> tuple[torch.Tensor, Any, Any]:
        """(sum, count, outputs) of a grain, computed in what the level says."""
        if self.precision.autocast is None and self.shards is None:
            return unpack(loss(grain))
        with self.autocast(), called_whole(self.shards):
            return unpack(loss(grain))

    def _check_first(self, done: Step, batch: Batch) -> None:
        value = done.loss
        if not math.isfinite(value):
            raise NonFiniteLoss(value, batch.grains[0].shapes() if batch.grains else "none on this rank")

    def _check_gradients(self, done: Step, batch: Batch) -> None:
        """Take the loss scale off, mend the divisor where the true count was not known, look for inf and nan."""
        if self.masters is not None:
            self.masters.pull_gradients()
        self._gradients = [parameter.grad for parameter in self._updated if parameter.grad is not None]
        if not self._gradients:
            raise NoGradients
        on_host = not isinstance(done.count, torch.Tensor) or done.count.device.type == "cpu"
        divisor = self._divisor(batch)
        if not on_host or float(done.count) != divisor:
            # Where nothing was counted this gives inf or nan, and the step is skipped.
            foreach_mul_(self._gradients, divisor / torch.as_tensor(done.count).double())
        self._found_inf.zero_()
        self.scale.unscale_and_check(self._gradients, self._found_inf)
        self.strategy.agree(self._found_inf)

    def _show_gradients(self, after_backward: Callable[[], None]) -> None:
        """Let a task look at the model's gradients, and change them."""
        if self.masters is not None:
            self.masters.push_gradients()
        self._lap("optimizer")
        after_backward()
        self._lap("compute")
        if self.masters is not None:
            self.masters.pull_changes()
        self.strategy.pull_gradients()
        self._gradients = [parameter.grad for parameter in self._updated if parameter.grad is not None]

    def _clip(self, done: Step) -> None:
        if self._clip_norm is not None:
            done.gradient_norm = self.strategy.total_norm(self._clip_norm.norm(self._gradients))
            self._clip_norm.scale(self._updated, done.gradient_norm)
        elif self.config.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._updated, self.config.clip_value)

    def _update(self) -> None:
        """Update unless gradients were not finite; on a GPU the optimizer itself looks, nobody waits."""
        if self._skips_on_device:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
            plain_step(self.optimizer)
            self.skips.note_on_device(self._found_inf)
        else:
            is_skipped = bool(self._found_inf.item())
            if not is_skipped:
                plain_step(self.optimizer)
            self.skips.note(is_skipped, self.num_steps)
        if self.precision.scaled:
            self.scale.update(self._found_inf)
        if self.masters is not None:
            self.masters.push_weights()
        if self.average is not None:
            self.average.update()

    def _set_learning_rate(self) -> float | None:
        if self.schedule is None:
            return None
        rate = self.schedule(self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        return rate

    def batches(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        **settings: Any,
    ) -> Iterator[Batch]:
        """This rank's part of every global batch, for as many epochs; `settings` are those of `DataSettings`.

        After a resume, the first call goes on where the interrupted one was.
        """
        return own_loop.batches(self, dataset, epochs, collate, DataSettings(**settings))

    def is_out_of_data(self) -> bool:
        """Of data of unknown length on several ranks: whether no rank has more, as the last reduction said."""
        if self.link.world.size == 1 or float(self._ranks_with_data):
            return False
        self._ranks_with_data = 1.0
        return True

    # -- between steps -------------------------------------------------------------------------------------------

    def evaluating(self) -> AbstractContextManager[None]:
        """The model in evaluation mode with complete statistics (and averaged weights); all ranks must enter."""
        return looking.evaluating(self)

    def whole_statistics(self) -> AbstractContextManager[None]:
        """Batch-norm statistics as one process would have them, for somebody who looks; all ranks must enter.

        With `reduce: param` the ranks are averaged first.
        """
        return looking.whole_statistics(self)

    def close(self) -> None:
        """Leave the other ranks, after a last average where they step apart."""
        if hasattr(self, "strategy"):
            self.sync()
        if self._owns_link:
            self.link.close()
