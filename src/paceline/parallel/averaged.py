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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.settings import ReduceSettings
from paceline.parallel import outer, wire
from paceline.parallel.flat import FlatAverage, StateAverage, by_kind, reset
from paceline.parallel.strategy import StepRecord, Strategy, Tally
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link

GROWTH = 8
"""How many times longer than the last an interval may be: a first step that took no time says little."""


class Averaged(Strategy):
    """`reduce: param` on several ranks."""

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
    ) -> None:
        """`weights_changed` is called when the optimizer's weights (masters) have another value."""
        super().__init__(parameters)
        self._link, self._settings, self._optimizer = link, settings, optimizer
        self._size = link.world.size
        self._weights_changed = weights_changed
        # Of its own, so that it does not matter what else ranks say to each other while an average is under way.
        self._group: dist.ProcessGroup = dist.new_group(timeout=timeout)
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        format_ = wire.build(settings.wire)

        def pieces(tensors: Sequence[Tensor], **options: Any) -> list[FlatAverage]:
            return [FlatAverage(alike, self._group, **options) for alike in by_kind(tensors)]

        self.weights = [
            FlatAverage(alike, self._group, wire=format_, outer=outer.build(settings, self._size))
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
        """Steps since the average that is under way was taken; -1: none is."""
        self._count: Any = 0.0
        self._expected = 0.0
        self._waited_s = 0.0
        self._began_s: float | None = None
        self._steps: list[StepRecord] = []
        self._sent_steps: list[StepRecord] = []
        self._flags = (True, False)
        self._tally = _Tally(self._group)
        self.spread = [0.0, 1.0]
        """(squared distance of this rank from the last average, squared norm of that), for the next tally."""
        self._counted = self._count_buffers()
        self.num_averages = 0
        self.blocked_s = 0.0
        """Seconds that steps have waited for averages, in all."""

    # -- the step ------------------------------------------------------------------------------------------------------

    @property
    def is_together(self) -> bool:
        return self._since == 0

    def start_step(self) -> None:
        if self._began_s is None:  # here, so that looking and saving between averages does not count as stepping
            self._began_s = time.perf_counter()
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, tally: Tally) -> None:
        raise AssertionError("there is nothing to reduce in a step")

    def reduce(self) -> Tensor:
        raise AssertionError("there is nothing to reduce in a step")

    def stepped(self, step: StepRecord, expected: float, has_next: bool, wants_stop: bool, is_last: bool) -> None:
        step.is_local = True
        self._steps.append(step)
        self._count = self._count + step.count
        self._expected += expected
        self._since += 1
        self._flags = (has_next, wants_stop)
        if self._flown >= 0:
            self._flown += 1
            for piece in self._pieces():
                if not piece.poll():
                    break  # what comes after it must be sent after it, on every rank
            if self._flown >= self._settings.sync_overlap:
                self._finish()
        if self._since >= self.interval or is_last:
            self._finish()
            self._start()
            if self._settings.sync_overlap == 0:
                self._finish()

    def sync(self) -> None:
        self._finish()
        if self._since:
            self._start()
            self._finish()

    def detach(self) -> None:
        self._finish()
        dist.destroy_process_group(self._group)

    # -- an average ----------------------------------------------------------------------------------------------------

    def _pieces(self) -> list[FlatAverage]:
        return [*self.weights, *self._others, *(self._state.pieces if self._state is not None else [])]

    def _start(self) -> None:
        """The model as it is now is on its way."""
        began = time.perf_counter()
        seconds = [0.0] * self._size
        seconds[self._link.world.rank] = began - (self._began_s or began) - self._waited_s
        # The expected count is the same everywhere: with equal shares the weights are exactly 1.
        weight = float(self._count) * self._size / self._expected if self._expected else 0.0
        counted = self._count_buffers()
        self._own_counted = [now - before for now, before in zip(counted, self._counted, strict=True)]
        if self._state is not None:
            self._state.bind()
        tally = {
            "weight": [weight],
            "flags": [float(flag) for flag in self._flags],
            "spread": [self.spread[0]],
            "seconds": seconds,
            "counted": self._own_counted,
            "state_steps": [] if self._state is None else self._state.send_steps(weight),
            "losses": _numbers([step.loss_sum for step in self._steps]),
            "counts": _numbers([step.count for step in self._steps]),
        }
        self._counted = counted
        self._tally.start(tally)
        for piece in self._pieces():
            piece.start(weight)
        self._sent_steps, self._steps = self._steps, []
        self._sent_since = self._since
        self._since, self._flown, self._count, self._expected = 0, 0, 0.0, 0.0
        self._waited_s, self._began_s = 0.0, None
        self.blocked_s += time.perf_counter() - began

    def _finish(self) -> None:
        """Wait for the average that is under way, if there is one, and apply it."""
        if self._flown < 0:
            return
        began = time.perf_counter()
        has_moved, self._flown = self._since > 0, -1
        found = self._tally.finish()
        for piece in self._pieces():
            piece.go_on()
        for piece in self._pieces():
            piece.wait()
        total = found["weight"][0]
        distances = [piece.finish(total, has_moved) for piece in self.weights]
        for piece in self._others:
            piece.finish(total, has_moved)
        self._add_counted(found["counted"])
        if self._state is not None:
            self._state.finish(total, has_moved, found["state_steps"])
        elif self._settings.sync_state == "reset":
            reset(self._optimizer)
        self._weights_changed()
        settings = self._settings
        self.interval = next_interval(settings.sync_step, settings.sync_seconds, self._sent_since, found["seconds"])
        self._tell(found)
        self.spread = [float(sum(values, start=torch.zeros(()))) for values in zip(*distances, strict=True)]
        self.num_averages += 1
        waited = time.perf_counter() - began
        if self._began_s is not None:  # else it was between two intervals, and is not in the time of either
            self._waited_s += waited
        self.blocked_s += waited

    def _tell(self, found: dict[str, list[float]]) -> None:
        """Complete the records of the steps that were averaged; the newest record hears of stops and ends of data."""
        for step, loss, count in zip(self._sent_steps, found["losses"], found["counts"], strict=True):
            step.loss_sum, step.count, step.is_local = torch.tensor(loss, dtype=torch.float64), count, False
        newest = (self._steps or self._sent_steps)[-1]
        newest.ranks_with_data, newest.ranks_to_stop = (torch.tensor(flag) for flag in found["flags"])
        if self.num_averages:
            # Of the average before, whose distances were known only after it.
            mean = found["spread"][0] / self._size
            self._sent_steps[-1].notes["spread"] = math.sqrt(mean / self.spread[1]) if self.spread[1] else 0.0
        self._sent_steps = []

    def _count_buffers(self) -> list[float]:
        if not self._counters:
            return []
        flat = torch.cat([counter.reshape(-1) for counter in self._counters])
        return [float(value) for value in flat.tolist()]

    def _add_counted(self, counted: list[float]) -> None:
        """Counters go on by what all ranks have counted, not only this one."""
        others = [total - mine for total, mine in zip(counted, self._own_counted, strict=True)]
        self._counted = [before + other for before, other in zip(self._counted, others, strict=True)]
        if not any(others):
            return
        pieces = torch.tensor(others, dtype=torch.float64).split([counter.numel() for counter in self._counters])
        for counter, piece in zip(self._counters, pieces, strict=True):
            counter += piece.view(counter.shape).to(counter)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def common_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What all ranks have alike beside the model: (tensors, plain values). Ranks must be together."""
        velocities = {
            f"velocity.{number}": piece.outer.velocity
            for number, piece in enumerate(self.weights)
            if piece.outer is not None and piece.outer.velocity is not None
        }
        return velocities, {"interval": self.interval, "num_averages": self.num_averages}

    def local_state(self) -> dict[str, Tensor]:
        """What only this rank has: what rounding on the wire has lost so far."""
        found = {"spread": torch.tensor(self.spread, dtype=torch.float64)}
        for number, piece in enumerate(self._pieces()):
            if piece.exchange is not None:
                found[f"lost.{number}"] = piece.exchange.lost
                found[f"lost_in_sum.{number}"] = piece.exchange.lost_in_sum
        return found

    @torch.no_grad()
    def load(self, common: Mapping[str, Tensor], values: Mapping[str, Any], local: Mapping[str, Tensor] | None) -> None:
        """Go on with the model as it has just been restored; without `local` nothing was lost. All ranks must call."""
        if self._settings.sync_seconds is not None:
            self.interval = int(values.get("interval", self.interval))
        self.num_averages = int(values.get("num_averages", 0))
        if self._state is not None:
            self._state.agree()
        for piece in self._pieces():
            piece.take_anchor()
        self._counted = self._count_buffers()
        for number, piece in enumerate(self.weights):
            velocity = common.get(f"velocity.{number}")
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


class _Tally:
    """Named numbers summed over the ranks, in float64 on the host; each rank must send the same names and lengths."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, numbers: dict[str, list[float]]) -> None:
        self._lengths = {name: len(values) for name, values in numbers.items()}
        flat = [value for values in numbers.values() for value in values]
        self._flat = torch.tensor(flat, dtype=torch.float64)
        trail.note("all_reduce of an average's tally", self._flat)
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> dict[str, list[float]]:
        self._work.wait()
        pieces = self._flat.split(list(self._lengths.values()))
        return {name: piece.tolist() for name, piece in zip(self._lengths, pieces, strict=True)}


def _numbers(values: Sequence[Any]) -> list[float]:
    """Numbers of the host as they are; those of a device in one transfer."""
    on_device = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
    found = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    if on_device:
        read = torch.stack([values[index].detach().double() for index in on_device]).tolist()
        for index, value in zip(on_device, read, strict=True):
            found[index] = value
    return found


def first_interval(sync_step: int | None) -> int:
    """Steps before the first average. By seconds it is one step, because nobody knows yet how long that takes."""
    return sync_step or 1


def next_interval(sync_step: int | None, sync_seconds: float | None, steps: int, seconds: Sequence[float]) -> int:
    """Steps until the next average, when each rank needed so many `seconds` for the last `steps` steps.

    By seconds: as many as the slowest rank does in that time.
    """
    if sync_seconds is None:
        assert sync_step is not None
        return sync_step
    slowest_s = max(seconds) / steps
    most = GROWTH * steps
    return max(1, most if slowest_s * most <= sync_seconds else int(sync_seconds / slowest_s))
