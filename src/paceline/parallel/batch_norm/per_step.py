"""Batch-norm running statistics that are summed over the grains in every step, in one order (`sums: exact`).

A layer that runs the grains of a step one after the other updates r <- (1-m) r + m s for each grain's statistic s. That
is linear: with k = 1-m and one call per grain

    r <- k^n r + sum over grains g of k^(n-1-g) (r_g - k r)        where r_g is what grain g makes of r: k r + m s_g

Every grain starts from the statistics before the step, which is also what a loss sees that evaluates the model. What it
adds to them is decayed for the grains after it, and these contributions are added in the tree with the gradients. So
all ranks have the same statistics after every step, and nothing is lost with a rank. A layer with momentum=None keeps
the mean over all of its calls, c before the step:

    r <- (c r + sum over grains g of ((c + calls_g) r_g - c r)) / (c + calls)

A step of one grain has nothing to add: the layers update themselves, and other ranks take over what they come to.

Layers that are joined over ranks (`sync_batchnorm`) are shared out as `RunningStatistics` does it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.core.errors import TaskContract
from paceline.core.torch_private import BatchNorm, foreach_copy_
from paceline.parallel.batch_norm.shares import RunningStatistics, SyncBatchNormRefused
from paceline.parallel.batch_norm.synchronized import JoinedBatchNorm
from paceline.world.link import Link


class StepStatistics(RunningStatistics):
    """Running statistics of a model's batch norms, equal on all ranks after every step."""

    def __init__(
        self, model: torch.nn.Module, link: Link, dtype: torch.dtype, beside: Sequence[torch.nn.Module] = ()
    ) -> None:
        """`dtype` is that in which contributions are added; `beside` are modules that a loss runs beside the model."""
        super().__init__(model, link)
        self._dtype = dtype
        modules = [module for each in (model, *beside) for module in each.modules()]
        self._all_layers = [module for module in dict.fromkeys(modules) if self._is_ours(module)]
        self._has_beside = bool(beside)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm) and link.has_group:
                raise SyncBatchNormRefused(name)
        self._running = [
            layer.get_buffer(name) for layer in self._all_layers for name in ("running_mean", "running_var")
        ]
        self._tracked_calls = [layer.get_buffer("num_batches_tracked") for layer in self._all_layers]
        sizes = [tensor.numel() for tensor in self._running]
        device = link.device
        self._num_floats, self._num_layers = sum(sizes), len(self._all_layers)
        self._layer_of = torch.repeat_interleave(
            torch.arange(len(sizes), device="cpu") // 2, torch.tensor(sizes, dtype=torch.int64, device="cpu")
        ).to(device)
        momenta = [1.0 if layer.momentum is None else layer.momentum for layer in self._all_layers]
        self._keep_each = (1.0 - torch.tensor(momenta, dtype=torch.float64, device="cpu")).to(device)
        is_mean = [layer.momentum is None for layer in self._all_layers]
        self._has_means = any(is_mean)
        self._is_mean = torch.tensor(is_mean, dtype=torch.bool, device="cpu").to(device)
        self._before = torch.zeros(self._num_floats, dtype=self._widest(), device=device)
        self._before_views = _views(self._before, self._running)
        self._room = torch.zeros_like(self._before)
        self._room_views = _views(self._room, self._running)
        self._calls_before = torch.zeros(self._num_layers, dtype=torch.int64, device=device)
        self._calls_before_views = list(self._calls_before.unbind())
        self._num_grains, self._number = 0, 0
        self._is_open = False
        """True within a step of several grains."""

    def _widest(self) -> torch.dtype:
        return torch.float64 if any(tensor.dtype == torch.float64 for tensor in self._running) else torch.float32

    def _is_ours(self, module: torch.nn.Module) -> TypeGuard[BatchNorm]:
        if not isinstance(module, BatchNorm) or isinstance(module, JoinedBatchNorm):
            return False
        return bool(module.track_running_stats) and module.running_mean is not None

    @property
    def num_numbers(self) -> int:
        return self._num_floats + self._num_layers

    def _find_layers(self) -> None:
        """Find the joined layers; all others are summed in every step."""
        joined = [
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, JoinedBatchNorm) and module.training and module.track_running_stats
        ]
        statistics = ("running_mean", "running_var")
        self._joined = [module.get_buffer(each) for _, module in joined for each in statistics]
        self._joined_counters = [module.get_buffer("num_batches_tracked") for _, module in joined]
        self._names = [f"{name}.{each}" for name, _ in joined for each in statistics]
        self._names += [f"{name}.num_batches_tracked" for name, _ in joined]

    def _known_buffers(self) -> set[int]:
        return {id(tensor) for tensor in (*self._running, *self._tracked_calls)} | super()._known_buffers()

    def _agree_on_other_buffers(self) -> None:
        """Take the first rank's statistics, too, where code outside of the steps of this engine has changed them."""
        super()._agree_on_other_buffers()
        if not self._running:
            return
        flat = torch.cat([tensor.reshape(-1).double() for tensor in self._running])
        places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
        everyone = self._link.gather_objects(torch.stack([flat.sum(), flat @ places]).tolist())
        if all(theirs == everyone[0] or _is_nan(theirs) for theirs in everyone):
            return
        for tensor in (*self._running, *self._tracked_calls):
            self._link.broadcast(tensor)
        logging.getLogger("paceline").warning(
            "batch-norm statistics differ between ranks, rank 0's are used: a loss of another engine runs this model, "
            "too? name it there, `prepare(..., beside=[model])`"
        )

    def begin_step(self, num_grains: int) -> None:
        """Begin a step; if the last one was left before its end, the statistics are again as they were before it."""
        if self._is_open:
            self._put_back()
        if self._has_beside and any(
            layer.running_mean is not mean for layer, mean in zip(self._all_layers, self._running[::2], strict=True)
        ):
            raise TaskContract(
                "a module in `beside` was moved or cast after the engine was prepared, which replaced its statistics",
                hint="call `prepare` of the module's own engine first, then that of the engine whose loss runs it",
            )
        self._num_grains = num_grains
        self._is_open = num_grains != 1 and bool(self._all_layers)
        if not self._all_layers or not (self._is_open or self._is_one_of_several):
            return
        foreach_copy_(self._before_views, self._running)
        torch.stack(self._tracked_calls, out=self._calls_before)

    @property
    def _is_one_of_several(self) -> bool:
        return self._link.world.size > 1

    def before_grain(self, number: int) -> None:
        """The layers start from the statistics before the step."""
        self._number = number

    def after_grain(self) -> Tensor | None:
        """Return the grain's contribution: statistics, then calls, of every layer; then they are as before the step."""
        if not self._all_layers or not (self._is_open or self._is_one_of_several):
            return None
        foreach_copy_(self._room_views, self._running)
        calls = torch.stack(self._tracked_calls) - self._calls_before
        floats = self._room
        if self._is_open:
            after, before, decays = self._weights(calls)
            kept = self._before * before.to(floats.dtype)[self._layer_of]
            floats = floats if after is None else floats * after.to(floats.dtype)[self._layer_of]
            floats = (floats - kept) * decays.to(floats.dtype)[self._layer_of]
            self._put_back()
        return torch.cat([floats.to(self._dtype), calls.to(self._dtype)])

    def _weights(self, calls: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return, by layer, factors on what a grain has left (None: 1), on what was before, and on the difference."""
        decays = self._keep_each.pow(calls * (self._num_grains - 1 - self._number))
        kept = self._keep_each.pow(calls)
        if not self._has_means:
            return None, kept, decays
        num_before = self._calls_before.double()
        ones = torch.ones_like(kept)
        after = torch.where(self._is_mean, num_before + calls, ones)
        return after, torch.where(self._is_mean, num_before, kept), torch.where(self._is_mean, ones, decays)

    def end_step(self, num_grains: int) -> None:
        """Nothing is decayed: `finish_step` does it."""

    def finish_step(self, sums: Tensor | None) -> None:
        """Make the statistics those of all grains of the step."""
        is_open, self._is_open = self._is_open, False
        if sums is None or not self._all_layers or not (is_open or self._is_one_of_several):
            return
        floats, calls = sums.split([self._num_floats, self._num_layers])
        if is_open:
            wide_calls = calls.double()
            keep, share = self._keep_each.pow(wide_calls), None
            if self._has_means:
                before = self._calls_before.double()
                all_calls = (before + wide_calls).clamp(min=1.0)
                keep = torch.where(self._is_mean & (wide_calls > 0), before / all_calls, keep)
                share = torch.where(self._is_mean, 1.0 / all_calls, 1.0)
                keep = torch.where(self._is_mean & (wide_calls == 0), 1.0, keep)
            torch.mul(self._before, keep.to(self._before.dtype)[self._layer_of], out=self._room)
            self._room += floats if share is None else floats * share.to(floats.dtype)[self._layer_of]
        else:
            self._room.copy_(floats)
        foreach_copy_(self._running, self._room_views)
        foreach_copy_(self._tracked_calls, list((self._calls_before + calls.long()).unbind()))

    def _put_back(self) -> None:
        foreach_copy_(self._running, self._before_views)
        foreach_copy_(self._tracked_calls, self._calls_before_views)

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Grains that are run in here are not accounted for; the caller puts the model's buffers back."""
        before = self._is_open, self._number, self._num_grains
        saved = self._before.clone(), self._calls_before.clone()
        try:
            yield
        finally:
            self._is_open, self._number, self._num_grains = before
            self._before.copy_(saved[0])
            self._calls_before.copy_(saved[1])


def _is_nan(numbers: list[float]) -> bool:
    return any(math.isnan(number) for number in numbers)


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]
