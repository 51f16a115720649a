"""Batch-norm running statistics that do not depend on the number of ranks.

One process that runs the grains of a step in order updates r <- (1-m) r + m s for each grain's statistic s. That is
linear, so the result is a sum over grains, and each rank can keep its own share of it: it lets the layers update on
its own grains as they are, decays its share by (1-m) for each grain that another rank ran, and the shares are added
only when somebody reads them (validation, checkpoint). Rank 0's share starts with the value so far, the others' with 0.
A layer with momentum=None keeps the mean over all of its calls: each rank has that of its own calls, and that of all
is their mean, weighted by their numbers.

Reading changes nothing: afterwards every rank goes on with its share as it was, bit for bit, and a checkpoint has the
shares beside their sum, so that a run that was stopped and goes on with as many ranks comes to the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.core.errors import PacelineError, TaskContract
from paceline.core.together import Exclusion
from paceline.core.torch_private import BatchNorm, foreach_add_, foreach_copy_, foreach_mul_, foreach_zero_
from paceline.parallel.batch_norm.synchronized import JoinedBatchNorm
from paceline.world.link import Link

_CALLS, _DECAYS = ":calls", ":decays"
"""Entries of `state` that are no buffers; names of buffers have no colon."""


class SyncBatchNormRefused(PacelineError):
    """Batch norm over ranks, in a model whose unit of numerics is the grain."""

    name: str
    excludes = (
        Exclusion(
            "a model with SyncBatchNorm of torch",
            "several ranks with `--reduce grad`",
            "mathematics",
            "It waits inside of forward for ranks that may have no grain in a step; `--sync-batchnorm` joins plain "
            "batch norms and knows when to.",
        ),
    )
    sentence = "{name!r} is a SyncBatchNorm, which would wait for ranks that have no grain in a step"
    hint = "use plain BatchNorm, whose statistics are per grain; `--sync-batchnorm all` joins the ranks' grains"


class _Aside:
    """Place for running statistics of one dtype, in one piece of memory: a few operations serve all layers."""

    def __init__(self, tensors: list[torch.Tensor], layers: list[int]) -> None:
        """`layers`: number of the layer that each of `tensors` belongs to."""
        self._tensors = tensors
        sizes = [tensor.numel() for tensor in tensors]
        self._flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
        pieces = self._flat.split(sizes)
        self._views = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
        self._layer_of = torch.repeat_interleave(
            torch.tensor(layers, device="cpu"), torch.tensor(sizes, device="cpu")
        ).to(self._flat.device)

    def take(self) -> None:
        """Put the statistics aside, and leave zeros."""
        foreach_copy_(self._views, self._tensors)
        foreach_zero_(self._tensors)

    def add_back(self, factors: torch.Tensor) -> None:
        """Add what was put aside, times the factor of its layer, (layers,)."""
        self._flat *= factors.to(self._flat.dtype)[self._layer_of]
        foreach_add_(self._tensors, self._views)


class RunningStatistics:
    """The running statistics of a model's batch norms, shared out over the ranks while it trains.

    A rank calls `begin_step`, around each of its grains `before_grain` and `after_grain`, and `end_step`; the numbers
    of its grains tell how many other ranks ran in between. A layer may be called several times per grain, or not at
    all, as long as that is the same for all grains of a step.
    """

    def __init__(self, model: torch.nn.Module, link: Link, *, are_shared_out: bool = True) -> None:
        """With `are_shared_out=False` every rank has its own, as with `reduce: param`, which averages them itself."""
        self._model = model
        self._link = link
        self._are_shared_out = are_shared_out and link.has_group
        self._is_shared = False
        self._layers: list[BatchNorm] = []
        self._joined: list[torch.Tensor] = []  # running statistics that the ranks make together
        self._joined_counters: list[torch.Tensor] = []
        self._means: list[torch.Tensor] = []  # running statistics that are means over all calls, mean and variance
        self._mean_counters: list[torch.Tensor] = []
        self._floats: list[torch.Tensor] = []
        self._names: list[str] = []  # of all of these buffers, as in `_buffers`
        self._shares: list[torch.Tensor] = []  # this rank's buffers as they were when they became totals
        self._totals: list[torch.Tensor] = []  # and as they have become
        self._aside: list[_Aside] = []
        self._missed = 0
        self._position = 0  # number of the first grain of the step that this rank's share does not account for

    def share(self) -> None:
        """Turn totals into shares; layers that are not in training mode keep their totals.

        Totals that nobody has changed become the shares that they were made of.
        """
        if self._is_shared or not self._are_shared_out:
            return
        self._is_shared = True
        before, shares, totals = self._buffers(), self._shares, self._totals
        self._shares, self._totals = [], []
        self._find_layers()
        now = self._buffers()
        if shares and [*map(id, now)] == [*map(id, before)] and all(map(torch.equal, now, totals)):
            for tensor, share in zip(now, shares, strict=True):
                tensor.copy_(share)
            return
        if not self._link.is_first and (self._layers or self._means):
            foreach_zero_([*self._floats, *self._counters(), *self._means, *self._mean_counters])
        if not self._layers:
            return
        places: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(self._floats):
            places.setdefault(tensor.dtype, []).append(place)
        self._aside = [_Aside([self._floats[i] for i in each], [i // 2 for i in each]) for each in places.values()]
        momenta = torch.tensor([layer.momentum for layer in self._layers], dtype=torch.float64, device="cpu")
        self._keep = (1.0 - momenta).to(self._floats[0].device)  # (layers,)
        self._tracked = torch.stack(self._counters())  # (layers,) calls so far
        self._calls = torch.ones_like(self._tracked)  # (layers,) calls in this rank's last grain
        self._decays = torch.zeros_like(self._tracked)  # (layers,) calls by others that the share has not decayed for

    def _find_layers(self) -> None:
        self._layers, self._floats, self._joined, self._joined_counters = [], [], [], []
        self._means, self._mean_counters = [], []
        own, joined, means = [], [], []
        for name, module in self._model.named_modules():
            if isinstance(module, BatchNorm) and module.training and module.track_running_stats:
                if isinstance(module, JoinedBatchNorm):
                    self._joined += [module.get_buffer("running_mean"), module.get_buffer("running_var")]
                    self._joined_counters.append(module.get_buffer("num_batches_tracked"))
                    joined.append(name)
                    continue
                if isinstance(module, torch.nn.SyncBatchNorm):
                    raise SyncBatchNormRefused(name)
                if module.momentum is None:
                    self._means += [module.get_buffer("running_mean"), module.get_buffer("running_var")]
                    self._mean_counters.append(module.get_buffer("num_batches_tracked"))
                    means.append(name)
                    continue
                self._layers.append(module)
                self._floats += [module.get_buffer("running_mean"), module.get_buffer("running_var")]
                own.append(name)
        statistics = ("running_mean", "running_var")
        self._names = [f"{name}.{each}" for name in own for each in statistics]
        self._names += [f"{name}.num_batches_tracked" for name in own]
        for others in (joined, means):
            self._names += [f"{name}.{each}" for name in others for each in statistics]
            self._names += [f"{name}.num_batches_tracked" for name in others]

    def _buffers(self) -> list[torch.Tensor]:
        joined = *self._joined, *self._joined_counters
        return [*self._floats, *self._counters(), *joined, *self._means, *self._mean_counters]

    def total(self) -> None:
        """Turn shares into totals, on every rank. All ranks must call it."""
        if not self._is_shared:
            return
        self._is_shared = False
        self._agree_on_other_buffers()
        self._shares = [tensor.clone() for tensor in self._buffers()]
        self._average_joined()
        if self._means:
            self._average_means()
        if self._layers:
            self._add_up()
        self._totals = [tensor.clone() for tensor in self._buffers()]

    def _add_up(self) -> None:
        foreach_mul_(self._floats, self._factors(self._decays))
        floats = torch.cat([tensor.reshape(-1).double() for tensor in self._floats])
        counters = torch.stack(self._counters())
        self._link.all_reduce(floats)
        self._link.all_reduce(counters)
        pieces = floats.split([tensor.numel() for tensor in self._floats])
        for tensor, piece in zip(self._floats, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
        for tensor, value in zip(self._counters(), counters.unbind(), strict=True):
            tensor.copy_(value)

    def _average_means(self) -> None:
        """Join means over the calls of each rank, weighted by their numbers; before any call, the first's."""
        calls = torch.stack(self._mean_counters)  # (layers,)
        sizes = [tensor.numel() for tensor in self._means]
        layer_of = [place // 2 for place, size in enumerate(sizes) for _ in range(size)]
        own = torch.cat([tensor.reshape(-1).double() for tensor in self._means])
        own_calls = calls[layer_of].double()
        sums = torch.stack((own, own * own_calls, own_calls))
        self._link.all_reduce(sums)
        self._link.all_reduce(calls)
        means = torch.where(sums[2] > 0, sums[1] / sums[2].clamp(min=1.0), sums[0])
        for tensor, piece in zip(self._means, means.split(sizes), strict=True):
            tensor.copy_(piece.view_as(tensor))
        for tensor, value in zip(self._mean_counters, calls.unbind(), strict=True):
            tensor.copy_(value)

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's shares while the model has totals, for a checkpoint; empty where there are none."""
        shares = dict(zip(self._names, self._shares, strict=True)) if self._shares else {}
        return shares | {_CALLS: self._calls, _DECAYS: self._decays} if shares and self._layers else shares

    def load(self, shares: Mapping[str, torch.Tensor]) -> None:
        """Go on with shares that `state` returned, instead of those that the totals gave; not with other layers'."""
        names = {*self._names, _CALLS, _DECAYS} if self._layers else {*self._names}
        if not self._is_shared or shares.keys() != names:
            return
        for name, tensor in zip(self._names, self._buffers(), strict=True):
            tensor.copy_(shares[name])
        if self._layers:
            self._tracked = torch.stack(self._counters())
            self._calls.copy_(shares[_CALLS])
            self._decays.copy_(shares[_DECAYS])

    def _agree_on_other_buffers(self) -> None:
        """Take the first rank's buffers that a model changes in its own way (spectral norms, codebooks): no shares."""
        shared = self._known_buffers()
        others = {name: tensor for name, tensor in self._model.named_buffers() if id(tensor) not in shared}
        prints = {name: repr(tensor.double().sum().item()) for name, tensor in others.items()}
        everyone = self._link.gather_objects(prints)
        differ = [name for name in prints if any(theirs[name] != prints[name] for theirs in everyone)]
        for name in differ:
            self._link.broadcast(others[name])
        if differ:
            logging.getLogger("paceline").warning(
                "buffers that forward changes differ between ranks, rank 0's are used: %s", ", ".join(differ)
            )

    def _known_buffers(self) -> set[int]:
        """Return the ids of the buffers that are known to differ between ranks, or to be equal."""
        return {id(tensor) for tensor in self._buffers()}

    def _average_joined(self) -> None:
        """Average the statistics of groups of ranks, and those of steps in which ranks were not joined."""
        if self._joined:
            flat = torch.cat([tensor.reshape(-1).double() for tensor in self._joined])
            self._link.all_reduce(flat)
            pieces = (flat / self._link.world.size).split([tensor.numel() for tensor in self._joined])
            for tensor, piece in zip(self._joined, pieces, strict=True):
                tensor.copy_(piece.view_as(tensor))
            for counter in self._joined_counters:
                self._link.broadcast(counter)

    def begin_step(self, num_grains: int) -> None:
        self._position = 0

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Grains that are run in here are not accounted for; the caller puts the model's buffers back."""
        if not self._layers:
            yield
            return
        before = self._tracked, self._calls, self._decays.clone(), self._missed, self._position
        try:
            yield
        finally:
            self._tracked, self._calls, self._decays, self._missed, self._position = before

    def before_grain(self, number: int) -> None:
        """Put the share aside before this rank's grain `number`, and let the layers start from 0.

        How often a layer is called is known only afterwards.
        """
        if self._layers:
            if not all(layer.training for layer in self._layers):
                raise TaskContract(
                    "a batch norm was put into evaluation mode between two steps; on several ranks it cannot be",
                    hint="freeze batch norms in `before_stage`, or before the model is prepared",
                )
            for aside in self._aside:
                aside.take()
            self._missed, self._position = number - self._position, number + 1

    def after_grain(self) -> torch.Tensor | None:
        """Add the share to the grain's statistics, after backward, during which they must not change.

        Return what the step has to sum over the grains of all ranks, for `finish_step`; None if nothing.
        """
        if self._layers:
            tracked = torch.stack(self._counters())
            self._calls = tracked - self._tracked
            self._tracked = tracked
            kept = self._keep.pow(self._decays + self._calls * (self._missed + 1))
            for aside in self._aside:
                aside.add_back(kept)
            self._decays = torch.zeros_like(self._decays)
        return None

    def finish_step(self, sums: torch.Tensor | None) -> None:
        """Take the sums of what `after_grain` returned, over the grains of all ranks."""

    @property
    def num_numbers(self) -> int:
        """Length of what `after_grain` returns."""
        return 0

    def end_step(self, num_grains: int) -> None:
        """Decay the share for the grains that other ranks ran after this rank's last one, of `num_grains` in all."""
        if self._layers and num_grains > self._position:
            self._decays += self._calls * (num_grains - self._position)

    def _factors(self, calls: torch.Tensor) -> list[torch.Tensor]:
        return [factor for factor in self._keep.pow(calls).unbind() for _ in ("mean", "var")]

    def _counters(self) -> list[torch.Tensor]:
        return [layer.get_buffer("num_batches_tracked") for layer in self._layers]
