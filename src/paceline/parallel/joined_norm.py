"""Batch norm over the grains of several ranks, for batches so small that a grain alone says little; on CPU, too.

A layer's mean and variance are those of the joined grains of a group of ranks. Mean, squared deviation and count of
each rank are gathered and put together (Chan et al. 1979), so that no digits are lost where the mean is large; backward
adds up the two sums that the gradient needs. It works where every rank has exactly one grain in a step; in a step where
some rank has none (the last of an epoch, say) every rank normalises its own grain, as plain batch norm does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.core.torch_private import BatchNorm, share_tensors
from paceline.world.discover.environment import World
from paceline.world.failure.flight_recorder import trail


class GroupDoesNotDivide(PacelineError):
    """The ranks cannot be dealt into groups of this size."""

    group: int
    ranks: int
    sentence = "`sync_batchnorm` is {group}, and the number of ranks, {ranks}, is no multiple of that"
    hint = "set it to {fitting}, or `all`"

    @property
    def fitting(self) -> str:
        return " or ".join(str(size) for size in range(2, self.ranks + 1) if self.ranks % size == 0)


class NotOneGrainPerRank(PacelineError):
    """Joined batch norm with ranks that run several grains in turn, or none."""

    grains: int
    ranks: int
    excludes = (
        Exclusion(
            "`--sync-batchnorm`",
            "`--grains` other than one per rank",
            "mathematics",
            "A rank runs its grains one after the other, so there is no moment at which the norms of all could meet.",
        ),
    )
    sentence = "`sync_batchnorm` joins one grain of each rank, but a step has {grains:#grain} for {ranks:#rank}"
    hint = "set `--grains {ranks}`, or leave out `sync_batchnorm`"


class JoinedBatchNorm(BatchNorm):
    """Replacement of a BatchNorm1d, 2d or 3d, with its parameters and buffers."""

    group: dist.ProcessGroup | None = None
    """Ranks that are joined; None: every rank for itself."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2, input.shape

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.group is None:
            return super().forward(input)
        join: Any = _Join.apply
        output, mean, variance, count = join(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self._follow(mean, variance * (count / (count - 1)))
        result: Tensor = output
        return result

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        counter = self.get_buffer("num_batches_tracked")
        counter += 1
        share = 1.0 / counter if self.momentum is None else self.momentum
        for buffer, value in (("running_mean", mean), ("running_var", variance)):
            running = self.get_buffer(buffer)
            running.add_((value.to(running.dtype) - running) * share)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any) -> Any:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        num = x.numel() // x.shape[1]
        own_mean = wide.mean(dims)
        moments = torch.cat([own_mean, (wide - own_mean.view(shape)).square().sum(dims), own_mean.new_full((1,), num)])
        everyone = [torch.empty_like(moments) for _ in range(group.size())]
        trail.note("all_gather of batch statistics", moments)
        dist.all_gather(everyone, moments, group=group)
        channels = x.shape[1]
        means, squares, counts = torch.stack(everyone).split([channels, channels, 1], dim=1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = (squares.sum(0) + ((means - mean).square() * counts).sum(0)) / count
        inverse = (variance + eps).rsqrt()
        normed = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normed, inverse, weight, count)
        ctx.group, ctx.dims, ctx.shape, ctx.dtype, ctx.has_bias = group, dims, shape, x.dtype, bias is not None
        output = normed
        if weight is not None:
            output = output * weight.to(dtype).view(shape)
        if bias is not None:
            output = output + bias.to(dtype).view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        normed, inverse, weight, count = ctx.saved_tensors
        gradient = gradient.to(normed.dtype)
        total = gradient.sum(ctx.dims)
        along = (gradient * normed).sum(ctx.dims)
        sums = torch.cat([total, along])
        trail.note("all_reduce of batch statistics", sums)
        dist.all_reduce(sums, group=ctx.group)
        all_total, all_along = (part.view(ctx.shape) / count for part in sums.chunk(2))
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        back = (gradient - all_total - normed * all_along) * scale.view(ctx.shape)
        of_weight = None if weight is None else along.to(weight.dtype)
        of_bias = total.to(weight.dtype if weight is not None else total.dtype) if ctx.has_bias else None
        return back.to(ctx.dtype), of_weight, of_bias, None, None


class JoinedNorms:
    """The batch norms of a model, joined over groups of `size` consecutive ranks; all ranks must make it."""

    def __init__(self, model: nn.Module, world: World, size: int, timeout: timedelta) -> None:
        if world.size % size:
            raise GroupDoesNotDivide(size, world.size)
        self._world = world
        # A group of its own: backward sends buckets of gradients in between.
        groups = [dist.new_group(range(first, first + size), timeout=timeout) for first in range(0, world.size, size)]
        self._group = groups[world.rank // size]
        self._is_checked = False
        self.layers = _replace(model)

    def begin_step(self, num_grains: int) -> None:
        """Join the layers in this step if every rank has a grain: all ranks decide alike."""
        if not self._is_checked and num_grains > self._world.size:
            raise NotOneGrainPerRank(num_grains, self._world.size)
        self._is_checked = True
        for layer in self.layers:
            layer.group = self._group if num_grains == self._world.size else None

    def detach(self) -> None:
        for layer in self.layers:
            layer.group = None
        dist.destroy_process_group(self._group)


def _replace(model: nn.Module) -> list[JoinedBatchNorm]:
    """Put a joined layer in the place of each batch norm; parameters, buffers and names stay the same objects."""
    layers = [module for module in model.modules() if isinstance(module, JoinedBatchNorm)]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                joined = JoinedBatchNorm(child.num_features, child.eps, child.momentum, affine=False)
                joined.affine, joined.track_running_stats = child.affine, child.track_running_stats
                share_tensors(joined, child)
                joined.train(child.training)
                setattr(parent, name, joined)
                layers.append(joined)
    return layers
