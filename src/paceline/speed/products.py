"""Products of activations with weights, where several share an input.

They are one product: their results lie side by side, and so do their gradients, in the same memory, if what takes a
result puts its gradient in its place (as `row_norm` does). Autograd would multiply each by itself, and add the
gradients of the input in a pass for each.
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
    """Of each group of weights (out, in, ...): one below the other, (all out, in) in this dtype; None of an empty one.

    All groups are copied at once.
    """
    made: list[Tensor | None] = []
    rows: list[Tensor] = []
    for group in groups:
        below = group[0].new_empty(sum(map(len, group)), group[0].shape[1], dtype=dtype) if group else None
        made.append(below)
        rows += [] if below is None else below.split([len(weight) for weight in group])
    if rows:
        foreach_copy_(rows, [weight.detach().view(len(weight), -1) for group in groups for weight in group])
    return made


def branches(x: Tensor, weights: Sequence[Tensor], below: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return the input again, for whatever comes after, and its products (..., out) with all weights.

    What takes the input must make a gradient of its own for it, which is added to in place.

    Args:
        x: (..., in)
        weights: (out, in) or (out, in, 1) each: parameters, which get their gradients in float32 at least.
        below: The same one below the other, in the dtype of `x`, as `stacked` makes them. Without, every product is
            by itself, as the compiler wants it.
    """
    if below is None:
        return x, [F.linear(x, weight.to(x.dtype).view(len(weight), -1)) for weight in weights]
    same, *products = _Branches.apply(x, below, *weights)  # type: ignore[no-untyped-call]
    return same, products


class _Branches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, below: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        wide = F.linear(x, below)
        ctx.save_for_backward(x, below, wide)
        ctx.shapes = [weight.shape for weight in weights]
        ctx.set_materialize_grads(False)
        return x.view_as(x), *wide.split([len(weight) for weight in weights], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, later: Tensor | None, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, below, wide = ctx.saved_tensors
        if not any(g is not None for g in gs):
            return later, None, *gs
        sizes = [shape[0] for shape in ctx.shapes]
        rows = _side_by_side(gs, wide, sizes).flatten(0, -2)
        needs_x, _, *needs = ctx.needs_input_grad
        of_weights: list[Tensor | None] = [None] * len(gs)
        if any(needs):
            given = zip(wide_product(rows, x.flatten(0, -2)).split(sizes), ctx.shapes, needs, strict=True)
            of_weights = [part.view(shape) if is_needed else None for part, shape, is_needed in given]
        return _added(later, rows, below, x) if needs_x else None, None, *of_weights


def _side_by_side(gs: Sequence[Tensor | None], wide: Tensor, sizes: Sequence[int]) -> Tensor:
    """(..., all out): gradients as one tensor, which they are if each has the place of its product."""
    pairs = list(zip(gs, wide.split(sizes, -1), strict=True))
    if all(g is not None and g.data_ptr() == part.data_ptr() and g.stride() == part.stride() for g, part in pairs):
        return wide
    if len(pairs) == 1:
        assert gs[0] is not None
        return gs[0]
    return torch.cat([torch.zeros_like(part) if g is None else g for g, part in pairs], -1)


def _added(later: Tensor | None, rows: Tensor, below: Tensor, x: Tensor) -> Tensor:
    """The gradient of the input: by these products, and what came after them."""
    if later is None:
        return (rows @ below).view_as(x)
    if not later.is_contiguous():
        return later + (rows @ below).view_as(x)
    later.flatten(0, -2).addmm_(rows, below)
    return later
