"""Products of activations with weights, where several share an input.

Forward they are one product, whose results lie side by side. If what takes a result puts its gradient in its place (as
`row_norm` can), the gradients of the input and of all weights are one product each, too; autograd would multiply each
by itself, and add those of the input in a pass for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.core.torch_private import foreach_copy_


def wide_product(g: Tensor, x: Tensor) -> Tensor:
    """(tokens, out), (tokens, in) -> (out, in), the gradient of a weight; products of half types in float32."""
    if g.is_cuda and g.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(g.T, x, out_dtype=torch.float32)
    return g.T @ x


@torch.no_grad()
def stacked(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor | None]:
    """Return the weights (out, in, ...) of each group one below the other, (all out, in) in this dtype; None for a
    group without any. All groups are copied at once."""
    stacks: list[Tensor | None] = []
    rows: list[Tensor] = []
    for group in groups:
        stack = group[0].new_empty(sum(map(len, group)), group[0].shape[1], dtype=dtype) if group else None
        stacks.append(stack)
        rows += [] if stack is None else stack.split([len(weight) for weight in group])
    if rows:
        foreach_copy_(rows, [weight.detach().view(len(weight), -1) for group in groups for weight in group])
    return stacks


def branches(
    x: Tensor, weights: Sequence[Tensor], stack: Tensor | None, *, is_sent: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return the input again, for whatever comes after, and its products (..., out) with all weights.

    What takes the input must make a gradient of its own for it: it is added to in place.

    Args:
        x: (..., in)
        weights: (out, in) or (out, in, 1) each: parameters, which get their gradients in float32 at least.
        stack: The same one below the other, in the dtype of `x`, as `stacked` makes them. Without, every product is
            by itself, as the compiler wants it.
        is_sent: The gradients of weights go to other ranks, who get them while backward goes on: each is computed as
            soon as that of its product is there, by a product of its own. At once they would come last of all. Take
            every product through `taken` then, just before it is used: backward goes the other way round.
    """
    if stack is None:
        return x, [F.linear(x, weight.to(x.dtype).view(len(weight), -1)) for weight in weights]
    sizes = [len(weight) for weight in weights]
    handed_on, *products = _Branches.apply(x, stack, sizes, *(() if is_sent else weights))  # type: ignore[no-untyped-call]
    return handed_on if x.requires_grad else x, products


def taken(product: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return a product of `branches` as it is; backward, the gradient of its weight is computed here."""
    same: Tensor = _Taken.apply(product, x.detach(), weight)  # type: ignore[no-untyped-call]
    return same


class _Branches(torch.autograd.Function):
    """The input, and parts of one product side by side, each of which may make place for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Tensor, sizes: list[int], *weights: Tensor) -> tuple[Tensor, ...]:
        wide = F.linear(x, stack)
        ctx.save_for_backward(x, stack, wide)
        ctx.sizes, ctx.shapes = sizes, [weight.shape for weight in weights]
        ctx.set_materialize_grads(False)
        return x.view_as(x), *wide.split(sizes, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_x: Tensor | None, *of_parts: Tensor | None) -> tuple[Tensor | None, ...]:
        x, stack, wide = ctx.saved_tensors
        needs_x, _, _, *needs = ctx.needs_input_grad
        of_weights: list[Tensor | None] = [None] * len(needs)
        if not any(each is not None for each in of_parts):
            return of_x, None, None, *of_weights
        rows = _side_by_side(of_parts, wide, ctx.sizes).flatten(0, -2)
        if any(needs):
            pieces = zip(wide_product(rows, x.flatten(0, -2)).split(ctx.sizes), ctx.shapes, needs, strict=True)
            of_weights = [piece.view(shape) if is_needed else None for piece, shape, is_needed in pieces]
        return _added(of_x, rows, stack, x) if needs_x else None, None, None, *of_weights


class _Taken(torch.autograd.Function):
    """A part of a product as it is; backward, the gradient of its weight. That of the input is `_Branches`'."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.shape = weight.shape
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (x,) = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return g, None, None
        return g, None, wide_product(g.flatten(0, -2), x.flatten(0, -2)).view(ctx.shape)


def _added(of_x: Tensor | None, rows: Tensor, stack: Tensor, x: Tensor) -> Tensor:
    """The gradient of the input: by these products, and by what came after them."""
    if of_x is None:
        return (rows @ stack).view_as(x)
    if not of_x.is_contiguous():
        return of_x + (rows @ stack).view_as(x)
    of_x.flatten(0, -2).addmm_(rows, stack)
    return of_x


def _side_by_side(of_parts: Sequence[Tensor | None], wide: Tensor, sizes: Sequence[int]) -> Tensor:
    """(..., all out): gradients as one tensor, which they are if each has the place of its part."""
    pairs = list(zip(of_parts, wide.split(sizes, -1), strict=True))
    if all(g is not None and g.data_ptr() == part.data_ptr() and g.stride() == part.stride() for g, part in pairs):
        return wide
    if len(pairs) == 1:
        assert of_parts[0] is not None
        return of_parts[0]
    return torch.cat([torch.zeros_like(part) if g is None else g for g, part in pairs], -1)
