"""The end of a block as an operator that PyTorch knows: what sub-blocks hand on (`ops`) becomes activations in full."""

# ruff: noqa: UP045 (the schema of an operator is read off these signatures, in which torch wants Optional)
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from paceline.recipes.speech.kernels.quartznet import reference
from paceline.speed.operators import operator


@operator("join")
def join(
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_affine: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
    frames: Optional[int],
    order: Optional[Tensor],
) -> Tensor:
    """Activations in full, where they are needed more than once: ReLU of a batch norm's output, or of a sum of two.

    Given `frames`, in the layout of everybody else: (batch, channel, frames), rows not padded; there utterance `i` is
    at place `order[i]` (int32), if that is given.
    """
    if y.is_cuda:
        from paceline.recipes.speech.kernels.quartznet import norm

        return norm.join(y, affine, other, other_affine, lengths, frames, order)
    return reference.join(y, affine, other, other_affine, lengths, frames, order)


@join.register_fake
def _(
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_affine: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
    frames: Optional[int],
    order: Optional[Tensor],
) -> Tensor:
    return torch.empty_like(y) if frames is None else y.new_empty(y.shape[1], y.shape[0], frames)


@operator("join_backward")
def join_backward(
    g: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_affine: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
    is_packed: bool,
    order: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y (and of other: the same), of affine, of other_affine."""
    if y.is_cuda:
        from paceline.recipes.speech.kernels.quartznet import norm

        backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = norm.join_backward
    else:
        backward = reference.join_backward
    h, sums, other_sums = backward(
        g, y, affine, moments, other, other_affine, other_moments, lengths, order, is_packed=is_packed
    )
    return h, sums.contiguous(), other_sums.contiguous()


@join_backward.register_fake
def _(
    g: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_affine: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
    is_packed: bool,
    order: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    sums, other_sums = (moments.new_empty(2, y.shape[0]) for _ in range(2))
    return torch.empty_like(y), sums, other_sums


def _save_join(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7], inputs[8])
    ctx.is_packed = inputs[7] is None


def _join_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    *saved, order = ctx.saved_tensors
    h, sums, other_sums = join_backward(g.contiguous(), *saved, ctx.is_packed, order)
    if saved[3] is None:
        return h, sums, *(None for _ in range(7))
    return h, sums, None, h, other_sums, None, None, None, None


join.register_autograd(_join_gradients, setup_context=_save_join)
