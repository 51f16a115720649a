"""Dropout, residual and layer norm as one operator, as they follow each attention and feed-forward of a Transformer.

Activations are read once and written once where PyTorch's own parts read and write them three times. Dropout follows
from a seed that is drawn from torch's generator, which the engine keys by (seed, step, grain); nothing of it is kept
for backward. The kernel is in use where it was measured (`ways`); elsewhere these are PyTorch's own parts.
"""

# ruff: noqa: UP045 (the schema of an operator is read off these signatures, in which torch wants Optional)
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.speed.layers.kernels import ways
from paceline.speed.layers.kernels.row_norm import factor, kept, threshold
from paceline.speed.operators import operator

MOST_WIDTH = 8192
"""Numbers of a row that a program of the kernel holds."""


@operator("added_norm")
def added_norm(
    x: Tensor,
    shift: Optional[Tensor],
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Optional[Tensor],
    dropout: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, width) each -> layer norm of residual + dropout(x + shift); the sum itself; (rows, 2) mean, 1 / deviation.

    `shift` is (width), the bias of the layer before; `seed` is (2,) int32, None without dropout.
    """
    if x.is_cuda:
        from paceline.speed.layers.kernels import added_rows

        return added_rows.forward(x, shift, residual, weight, bias, seed, threshold(dropout), factor(dropout), eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if shift is None else x.to(wide) + shift.to(wide)
    if seed is not None:
        total = torch.where(kept(seed, x.shape, dropout), total * factor(dropout), 0.0)
    total = (total + residual.to(wide)).to(x.dtype)
    variance, mean = torch.var_mean(total.to(wide), 1, correction=0)
    inverse = torch.rsqrt(variance + eps)
    normed = (total.to(wide) - mean[:, None]) * inverse[:, None] * weight.to(wide) + bias.to(wide)
    return normed.to(x.dtype), total, torch.stack([mean, inverse], 1)


@added_norm.register_fake
def _(
    x: Tensor,
    shift: Optional[Tensor],
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Optional[Tensor],
    dropout: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), 2, dtype=wide)


@operator("added_norm_backward")
def added_norm_backward(
    g: Tensor,
    g_total: Optional[Tensor],
    total: Tensor,
    moments: Tensor,
    weight: Tensor,
    seed: Optional[Tensor],
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the residual, and (3, width) of weight, bias and shift."""
    if g.is_cuda:
        from paceline.speed.layers.kernels import added_rows

        return added_rows.backward(g, g_total, total, moments, weight, seed, threshold(dropout), factor(dropout))
    wide = moments.dtype
    mean, inverse = moments[:, :1], moments[:, 1:]
    away = (total.to(wide) - mean) * inverse
    steep = g.to(wide) * weight.to(wide)
    of_total = inverse * (steep - steep.mean(1, keepdim=True) - away * (steep * away).mean(1, keepdim=True))
    if g_total is not None:
        of_total = of_total + g_total.to(wide)
    of_x = of_total
    if seed is not None:
        of_x = torch.where(kept(seed, g.shape, dropout), of_total * factor(dropout), 0.0)
    sums = torch.stack([(g.to(wide) * away).sum(0), g.to(wide).sum(0), of_x.sum(0)])
    of_residual = of_total.to(total.dtype)
    return of_x.to(total.dtype) if seed is not None else of_residual.clone(), of_residual, sums


@added_norm_backward.register_fake
def _(
    g: Tensor,
    g_total: Optional[Tensor],
    total: Tensor,
    moments: Tensor,
    weight: Tensor,
    seed: Optional[Tensor],
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(total), torch.empty_like(total), moments.new_empty(3, total.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, shift, _, weight, bias, seed, dropout, _ = inputs
    _, total, moments = output
    ctx.save_for_backward(total, moments, weight, seed)
    ctx.dropout, ctx.bias_dtype = dropout, bias.dtype
    ctx.shift_dtype = None if shift is None else shift.dtype
    ctx.mark_non_differentiable(moments)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, g_total: Tensor | None, _: None) -> tuple[Any, ...]:
    total, moments, weight, seed = ctx.saved_tensors
    if g is None and g_total is None:
        return (None,) * 8
    whole = torch.zeros_like(total) if g is None else g.contiguous()
    further = None if g_total is None else g_total.contiguous()
    of_x, of_residual, sums = added_norm_backward(whole, further, total, moments, weight, seed, ctx.dropout)
    of_shift = None if ctx.shift_dtype is None else sums[2].to(ctx.shift_dtype)
    return of_x, of_shift, of_residual, sums[0].to(weight.dtype), sums[1].to(ctx.bias_dtype), None, None, None


added_norm.register_autograd(_gradients, setup_context=_setup)


def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    dropout: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return (layer norm of the sum, the sum) with the sum residual + dropout(x), all (..., width).

    After-norm Transformers go on with the first, pre-norm ones compute with the first and go on with the second.
    """
    rate = dropout if training else 0.0
    if not _has_kernel(x, residual):
        total = residual + F.dropout(x, rate, training)
        return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total
    seed = None
    if rate:
        seed = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=x.device)
    rows, others = x.reshape(-1, x.shape[-1]), residual.to(x.dtype).reshape(-1, x.shape[-1])
    normed, total, _ = added_norm(rows, None, others, weight, bias, seed, rate, eps)
    return normed.view(x.shape), total.view(x.shape)


def _has_kernel(x: Tensor, residual: Tensor) -> bool:
    if not (x.is_cuda and ways.in_use().added_norm) or x.shape[-1] > MOST_WIDTH or x.shape != residual.shape:
        return False
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and residual.dtype == x.dtype


class DropoutAddNorm(nn.Module):
    """Dropout, residual and layer norm: `normed, total = module(x, residual)`. Weights are those of `nn.LayerNorm`."""

    def __init__(
        self,
        width: int,
        dropout: float = 0.0,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))
        self.dropout, self.eps = dropout, eps

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return dropout_add_norm(
            x, residual, self.weight, self.bias, dropout=self.dropout, training=self.training, eps=self.eps
        )
