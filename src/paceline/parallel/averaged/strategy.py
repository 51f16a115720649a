"""Parameter reduction: ranks step apart, each on its own grains, and average their models now and then.

A rank divides the loss of its step by its own count, and its weight in the next average is its count since the last
one. So one step between averages is exactly gradient reduction for SGD: the weighted mean of w - lr g_r / n_r with
weights n_r is w - lr (sum of g_r) / (sum of n_r); the same holds for a momentum that is averaged too.

What is averaged: the trained weights (fp32 masters where there are some), their moving average, buffers (batch-norm
statistics) and, by policy, the optimizer's state. Counters of buffers add up what every rank has counted.

Ranks come together after `sync_step` steps (or as many as `sync_seconds` hold, agreed in the collective itself), at
the end of an epoch, and whenever somebody asks (`sync`). With `sync_overlap` the average of the weights at step t is
applied at step t + overlap, as a correction: w += average - w at step t. Losses, counts, requests to stop and the end
of data travel with the average; between averages there is no communication at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.settings import ReduceSettings
from paceline.observe.clock import Clock
from paceline.parallel import wire
from paceline.parallel.averaged import outer_optimizer
from paceline.parallel.averaged.flat_average import FlatAverage, StateAverage, by_kind, reset
from paceline.parallel.step import Average, RankNumbers, Step, Sums, Tally
from paceline.parallel.strategy import GlobalBatch, Part, Strategy, StrategyState
from paceline.world import group_sockets
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link

GROWTH = 8
"""Largest ratio of an interval to the one before: a first step that took no time says little."""


class Averaged(Strategy):
    """`reduce: param` on several ranks."""

    meets_on_host = True

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        link: Link,
        settings: ReduceSettings,
        *,
        optimizer: torch.optim.Optimizer,
        buffers: Mapping[str, Tensor],
        weight_average: Sequence[Tensor] = (),
        timeout: timedelta = timedelta(seconds=1800),
        weights_changed: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Average `parameters`; `weights_changed` is called after the optimizer's weights (masters) have changed."""
        super().__init__(parameters)
        self._link, self._settings, self._optimizer, self._clock = link, settings, optimizer, clock
        self._size = link.world.size
        self._weights_changed = weights_changed
        # A group of its own: other collectives may run while an average is in flight.
        with group_sockets.noted():
            self._group: dist.ProcessGroup = dist.new_group(timeout=timeout)
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        format_ = wire.build(settings.wire)

        def pieces(tensors: Sequence[Tensor], **options: Any) -> list[FlatAverage]:
            return [FlatAverage(alike, self._group, **options) for alike in by_kind(tensors)]

        self.weights = [
            FlatAverage(alike, self._group, wire=format_, outer=outer_optimizer.build(settings, self._size))
            for alike in by_kind(weights)
        ]
        floats = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
        self._others = pieces(weight_average, wire=format_) + pieces(floats, by_difference=True)
        self._counters = [buffer for buffer in buffers.values() if buffer.dtype in (torch.int64, torch.int32)]
        self._state = StateAverage(optimizer, link, self._group, settings) if settings.sync_state == "average" else None
        self.interval = first_interval(settings.sync_step)
        self._since = 0
        """Steps since the last average was taken."""
        self._flown = -1
        """Steps since the average in flight was taken; -1: none is."""
        self._count: Any = 0.0
        self._expected = 0.0
        self._waited_s = 0.0
        self._began_s: float | None = None
        self._batch_count, self._is_last = 0.0, False
        self._steps: list[tuple[int, Tally]] = []
        """(number, tally of this rank) of every step since the last average was taken."""
        self._sent_steps: list[int] = []
        self._tally = _Tally(self._group)
        self.spread = [0.0, 1.0]
        """(squared distance of this rank from the last average, squared norm of that), for the next tally."""
        self._counted = self._count_buffers()
        self.num_averages = 0
        self.blocked_s = 0.0
        """Seconds that steps have waited for averages so far."""

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def is_together(self) -> bool:
        return self._since == 0

    def begin(self, batch: GlobalBatch) -> None:
        if self._began_s is None:  # here, so that looking and saving between averages does not count as stepping
            self._began_s = time.perf_counter()
        self._batch_count, self._is_last = batch.count, batch.is_last
        for parameter in self.parameters:
            parameter.grad = None

    def divisor(self, batch: GlobalBatch) -> float:
        return batch.own_count or 1

    def last_backward(self) -> None:
        """Nothing is sent during backward."""

    def reduce(self, numbers: RankNumbers) -> Sums:
        """Return this rank's own: the update is made of its own gradients."""
        return Sums(numbers.in_turn())

    def updates(self, batch: GlobalBatch) -> bool:
        """A rank without grains in this step has learned nothing that it could update with."""
        return bool(batch.grains)

    def finish(self, step: Step) -> Step:
        """Return the record of the step: of this rank alone, or of all ranks if they have come together with it."""
        self._steps.append((step.number, Tally(step.loss_sum, step.count, step.ranks_with_data, step.ranks_to_stop)))
        self._count = self._count + step.count
        self._expected += self._batch_count
        self._since += 1
        average = self._advance()
        if self._clock is not None:
            if self.is_together:
                self._clock.meet()
            else:
                self._clock.lap("communication")
        return _record(step, average)

    def _advance(self) -> Average | None:
        """After a step: go on with the average in flight, and start the next one if it is time."""
        average = None
        if self._flown >= 0:
            self._flown += 1
            for piece in self._pieces():
                if not piece.poll():
                    break  # what comes after it must be sent after it, on every rank
            if self._flown >= self._settings.sync_overlap:
                average = self._finish()
        if self._since >= self.interval or self._is_last:
            average = self._finish() or average
            self._start()
            if self._settings.sync_overlap == 0:
                average = self._finish()
        return average

    def sync(self) -> Average | None:
        average = self._finish()
        if self._since:
            self._start()
            last = self._finish()
            average = last if average is None else average.then(last)
        return average

    def detach(self) -> None:
        self._finish()
        dist.destroy_process_group(self._group)

    # -- an average ----------------------------------------------------------------------------------------------------

    def _pieces(self) -> list[FlatAverage]:
        return [*self.weights, *self._others, *(self._state.pieces if self._state is not None else [])]

    def _start(self) -> None:
        """Start an average of the models as they are now."""
        began = time.perf_counter()
        seconds = [0.0] * self._size
        seconds[self._link.world.rank] = began - (self._began_s or began) - self._waited_s
        # The expected count is the same everywhere: with equal shares the weights are exactly 1.
        weight = float(self._count) * self._size / self._expected if self._expected else 0.0
        counted = self._count_buffers()
        self._own_counted = [now - before for now, before in zip(counted, self._counted, strict=True)]
        if self._state is not None:
            self._state.bind()
        tallies = [tally for _, tally in self._steps]
        numbers = {
            "weight": [weight],
            "flags": [float(tallies[-1].ranks_with_data), float(tallies[-1].ranks_to_stop)],
            "spread": [self.spread[0]],
            "seconds": seconds,
            "counted": self._own_counted,
            "state_steps": [] if self._state is None else self._state.send_steps(weight),
            "losses": _numbers([tally.loss_sum for tally in tallies]),
            "counts": _numbers([tally.count for tally in tallies]),
        }
        self._counted = counted
        self._tally.start(numbers)
        for piece in self._pieces():
            piece.start(weight)
        self._sent_steps, self._steps = [number for number, _ in self._steps], []
        self._sent_since = self._since
        self._since, self._flown, self._count, self._expected = 0, 0, 0.0, 0.0
        self._waited_s, self._began_s = 0.0, None
        self.blocked_s += time.perf_counter() - began

    def _finish(self) -> Average | None:
        """Wait for the average in flight, if there is one, and apply it."""
        if self._flown < 0:
            return None
        began = time.perf_counter()
        has_moved, self._flown = self._since > 0, -1
        sums = self._tally.finish()
        for piece in self._pieces():
            piece.go_on()
        for piece in self._pieces():
            piece.wait()
        total = sums["weight"][0]
        distances = [piece.finish(total, has_moved) for piece in self.weights]
        for piece in self._others:
            piece.finish(total, has_moved)
        self._add_counted(sums["counted"])
        if self._state is not None:
            self._state.finish(total, has_moved, sums["state_steps"])
        elif self._settings.sync_state == "reset":
            reset(self._optimizer)
        self._weights_changed()
        settings = self._settings
        self.interval = next_interval(settings.sync_step, settings.sync_seconds, self._sent_since, sums["seconds"])
        average = self._completed(sums)
        self.spread = [
            float(sum(values, start=torch.zeros((), dtype=torch.float64, device="cpu")))
            for values in zip(*distances, strict=True)
        ]
        self.num_averages += 1
        waited = time.perf_counter() - began
        if self._began_s is not None:  # else it was between two intervals, and is not in the time of either
            self._waited_s += waited
        self.blocked_s += waited
        return average

    def _completed(self, sums: dict[str, list[float]]) -> Average:
        """Return the records of the steps that were averaged, with the numbers of all ranks."""
        notes: dict[str, float] = {}
        if self.num_averages:
            # Of the average before, whose distances were known only after it.
            mean = sums["spread"][0] / self._size
            notes = {"spread": math.sqrt(mean / self.spread[1]) if self.spread[1] else 0.0}
        last = self._sent_steps[-1]
        steps = tuple(
            Step(
                number,
                torch.tensor(loss, dtype=torch.float64, device="cpu"),
                count,
                notes=notes if number == last else {},
            )
            for number, loss, count in zip(self._sent_steps, sums["losses"], sums["counts"], strict=True)
        )
        self._sent_steps = []
        with_data, to_stop = (torch.tensor(flag, dtype=torch.float32, device="cpu") for flag in sums["flags"])
        return Average(steps, with_data, to_stop)

    def _count_buffers(self) -> list[float]:
        if not self._counters:
            return []
        flat = torch.cat([counter.reshape(-1) for counter in self._counters])
        return [float(value) for value in flat.tolist()]

    def _add_counted(self, counted: list[float]) -> None:
        """Add to the counters what the other ranks have counted."""
        others = [total - local for total, local in zip(counted, self._own_counted, strict=True)]
        self._counted = [before + other for before, other in zip(self._counted, others, strict=True)]
        if not any(others):
            return
        pieces = torch.tensor(others, dtype=torch.float64, device="cpu").split(
            [counter.numel() for counter in self._counters]
        )
        for counter, piece in zip(self._counters, pieces, strict=True):
            counter += piece.view(counter.shape).to(counter)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> StrategyState:
        """Return the velocities of the outer optimizer and, of this rank alone, what rounding on the wire has lost."""
        velocities = {
            f"velocity.{number}": piece.outer.velocity
            for number, piece in enumerate(self.weights)
            if piece.outer is not None and piece.outer.velocity is not None
        }
        local = {"spread": torch.tensor(self.spread, dtype=torch.float64, device="cpu")}
        for number, piece in enumerate(self._pieces()):
            if piece.exchange is not None:
                local[f"lost.{number}"] = piece.exchange.lost
                local[f"lost_in_sum.{number}"] = piece.exchange.lost_in_sum
        return StrategyState(velocities, {"interval": self.interval, "num_averages": self.num_averages}, local)

    def own_part(self, parts: Sequence[Part]) -> Part | None:
        """Ranks go on with their own if there are as many as there were."""
        return parts[self._link.world.rank] if len(parts) == self._size else None

    @torch.no_grad()
    def load(self, state: StrategyState) -> None:
        """Go on from `state`; without `local` nothing was lost."""
        values, local = state.values, state.local
        if self._settings.sync_seconds is not None:
            self.interval = int(values.get("interval", self.interval))
        self.num_averages = int(values.get("num_averages", 0))
        if self._state is not None:
            self._state.agree()
        for piece in self._pieces():
            piece.take_anchor()
        self._counted = self._count_buffers()
        for number, piece in enumerate(self.weights):
            velocity = state.common.get(f"velocity.{number}")
            if piece.outer is not None and velocity is not None:
                assert piece.anchor is not None
                piece.outer.velocity = velocity.to(piece.anchor, copy=True)
        if local is None:
            return
        self.spread = local["spread"].tolist()
        for number, piece in enumerate(self._pieces()):
            if piece.exchange is not None and f"lost.{number}" in local:
                piece.exchange.lost.copy_(local[f"lost.{number}"])
                piece.exchange.lost_in_sum.copy_(local[f"lost_in_sum.{number}"])


def _record(step: Step, average: Average | None) -> Step:
    """Return the record of a step of this rank: of all ranks where `average` contains it."""
    if average is None:
        return replace(step, ranks_with_data=None, ranks_to_stop=None, is_local=True)
    newest = average.steps[-1]
    is_averaged = newest.number == step.number
    return replace(
        step,
        loss_sum=newest.loss_sum if is_averaged else step.loss_sum,
        count=newest.count if is_averaged else step.count,
        ranks_with_data=average.ranks_with_data,
        ranks_to_stop=average.ranks_to_stop,
        is_local=not is_averaged,
        notes=newest.notes if is_averaged else step.notes,
        average=average,
    )


class _Tally:
    """Named numbers summed over the ranks, in float64 on the host; each rank must send the same names and lengths."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, numbers: dict[str, list[float]]) -> None:
        self._lengths = {name: len(values) for name, values in numbers.items()}
        flat = [value for values in numbers.values() for value in values]
        self._flat = torch.tensor(flat, dtype=torch.float64, device="cpu")
        trail.note("all_reduce of an average's tally", self._flat)
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> dict[str, list[float]]:
        self._work.wait()
        pieces = self._flat.split(list(self._lengths.values()))
        return {name: piece.tolist() for name, piece in zip(self._lengths, pieces, strict=True)}


def _numbers(values: Sequence[Any]) -> list[float]:
    """Return numbers of the host as they are, and those of a device by one transfer."""
    on_device = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
    numbers = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    if on_device:
        read = torch.stack([values[index].detach().double() for index in on_device]).tolist()
        for index, value in zip(on_device, read, strict=True):
            numbers[index] = value
    return numbers


def first_interval(sync_step: int | None) -> int:
    """Return the steps before the first average: one if by seconds, because the time of a step is not known yet."""
    return sync_step or 1


def next_interval(sync_step: int | None, sync_seconds: float | None, steps: int, seconds: Sequence[float]) -> int:
    """Return the steps until the next average, given the `seconds` of each rank for the last `steps` steps.

    By seconds: as many as the slowest rank does in that time.
    """
    if sync_seconds is None:
        assert sync_step is not None
        return sync_step
    slowest_s = max(seconds) / steps
    most = GROWTH * steps
    return max(1, most if slowest_s * most <= sync_seconds else int(sync_seconds / slowest_s))
