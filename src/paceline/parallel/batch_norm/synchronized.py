"""Batch norm over the grains of several ranks, for batches so small that a grain alone says little; on CPU, too.

A layer's mean and variance are those of the joined grains of a group of ranks. Mean, squared deviation and count of
each rank are gathered and put together (Chan et al. 1979), so that no digits are lost where the mean is large; backward
adds up the two sums that the gradient needs. It works where every rank has exactly one grain in a step; in a step where
some rank has none (the last of an epoch, or one whose stream has ended) every rank normalises its own grain, as plain
batch norm does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import InvalidSetting, PacelineError
from paceline.core.together import Exclusion
from paceline.core.torch_private import BatchNorm
from paceline.world import group_sockets
from paceline.world.discover.environment import World
from paceline.world.failure.flight_recorder import trail


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


class GrainsOfStep(Protocol):
    """This rank's share of a global batch, as far as joined norms need it."""

    @property
    def num_grains(self) -> int:
        """Grains over all ranks."""
        ...

    @property
    def grains(self) -> Sequence[Any]: ...

    @property
    def knows_others(self) -> bool:
        """False if other ranks may have no grain where `num_grains` counts one for them."""
        ...


class NotCalled(PacelineError):
    """A batch norm with a forward of its own that computes the statistics itself."""

    kind: str
    sentence = "`sync_batchnorm` is set, but forward of {kind}, a batch norm, does not call that of its base class"
    hint = "let it call `super().forward(x)`, which joins the ranks, or leave out `sync_batchnorm`"


class JoinedBatchNorm(BatchNorm):
    """What a BatchNorm1d, 2d or 3d becomes: its class stays above this one, and what it does around the norm, too.

    A copy of a joined layer, and one that was pickled, is a plain layer again: a group of ranks is of this process.
    """

    plain: ClassVar[type[BatchNorm]]
    """Class of the layer before."""
    group: dist.ProcessGroup | None = None
    """Ranks that are joined; None: every rank for itself."""
    was_joined = False
    """True if the last forward in training has come to `forward` of this class."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.group is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        self.was_joined = True
        join: Any = _Join.apply
        output, mean, variance, count = join(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self._follow(mean, variance * (count / (count - 1)))
        result: Tensor = output
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in ("group", "was_joined")}
        return object.__new__, (self.plain,), state

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
            fitting = " or ".join(str(group) for group in range(2, world.size + 1) if world.size % group == 0)
            raise InvalidSetting(
                f"`sync_batchnorm` is {size}, and the number of ranks, {world.size}, is not a multiple of that",
                hint=f"set it to {fitting}, or `all`",
            )
        self._world = world
        # A group of its own: backward sends buckets of gradients in between.
        firsts = range(0, world.size, size)
        with group_sockets.noted():
            groups = [dist.new_group(range(first, first + size), timeout=timeout) for first in firsts]
        self._group = groups[world.rank // size]
        self._is_checked = False
        self.layers = _join(model)

    def begin_step(self, batch: GrainsOfStep) -> None:
        """Join the layers in this step if every rank has a grain: all ranks of a group decide alike."""
        if not self._is_checked and batch.num_grains > self._world.size:
            raise NotOneGrainPerRank(batch.num_grains, self._world.size)
        self._is_checked = True
        group = self._group if batch.num_grains == self._world.size else None
        if group is not None and not batch.knows_others and not self._all_have_grains(batch):
            group = None
        for layer in self.layers:
            layer.group = group

    def _all_have_grains(self, batch: GrainsOfStep) -> bool:
        """Ask the ranks of the group: one whose stream has ended does not come to forward, where others would wait."""
        have = torch.tensor(len(batch.grains), dtype=torch.int64, device="cpu")
        trail.note("all_reduce of numbers of grains", have)
        dist.all_reduce(have, dist.ReduceOp.MIN, group=self._group)
        return bool(have)

    def detach(self) -> None:
        for layer in self.layers:
            layer.group = None
        dist.destroy_process_group(self._group)


def _join(model: nn.Module) -> list[JoinedBatchNorm]:
    """Make joined layers of a model's batch norms, in place: parameters, buffers, hooks and names stay."""
    layers: list[JoinedBatchNorm] = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            layer: Any = module
            if not isinstance(layer, JoinedBatchNorm):
                layer.__class__ = _joined_class(type(layer))  # type: ignore[arg-type]
            layers.append(layer)
    return layers


@cache
def _joined_class(kind: type[BatchNorm]) -> type[JoinedBatchNorm]:
    """Return a subclass of `kind` in which `super().forward` of `kind` is the joined one."""
    members: dict[str, Any] = {"plain": kind}
    if kind.forward is not BatchNorm.forward:
        members["forward"] = _checked_forward(kind)
    return type(f"Joined{kind.__name__}", (kind, JoinedBatchNorm), members)


def _checked_forward(kind: type[BatchNorm]) -> Callable[..., Any]:
    """Return forward of a class that has one of its own; it raises `NotCalled` if the ranks were not joined in it."""

    def forward(self: JoinedBatchNorm, *args: Any, **options: Any) -> Any:
        self.was_joined = False
        output = kind.forward(self, *args, **options)
        if self.training and self.group is not None and not self.was_joined:
            raise NotCalled(kind.__qualname__)
        return output

    return forward
