"""Products that share an input, whose gradients are added in the product that computes the next of them.

Autograd would write each gradient of the input and add it to the others in a pass of its own: four times the traffic.
Here the input goes through one product after the other, and so does its gradient, the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def branch(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(..., channels), (filters, channels) -> (..., filters), and the input again, for whatever comes after.

    What takes the second result must make a gradient of its own for it: it is added to in place.
    """
    if torch.compiler.is_compiling():
        return F.linear(x, weight), x  # the compiler sees what may be added in place
    y, same = _Branch.apply(x, weight)  # type: ignore[no-untyped-call]
    return y, same


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return F.linear(x, weight), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, later: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if g is None:
            return later, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        rows = g.flatten(0, -2)
        of_weight = rows.t() @ x.flatten(0, -2) if needs_weight else None
        if not needs_x:
            return None, of_weight
        if later is None:
            return (rows @ weight).view_as(x), of_weight
        if not later.is_contiguous():
            return later + (rows @ weight).view_as(x), of_weight
        later.flatten(0, -2).addmm_(rows, weight)
        return later, of_weight
