"""What follows a convolution with channels last, as one operator that PyTorch knows: batch norm, sum, ReLU, dropout.

Of one input, or of several that are batch-normed each by itself and added (a residual from every block before). Every
activation is read once for the statistics and once to be used, and backward twice; between those passes nothing is
written. On a CPU the reference below computes the same, in any dtype.

Inputs may be products that lie side by side (`products.branches`), and the gradient of each may take its place, beside
the others'.
"""

# ruff: noqa: UP045 (the schema of an operator is read off these signatures, in which torch wants Optional)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from paceline.core.errors import TaskContract
from paceline.speed.operators import operator


@operator("row_norm")
def row_norm(
    ys: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    lengths: Optional[Tensor],
    seed: Optional[Tensor],
    dropout: float,
    eps: float,
    takes_places: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, time, channels) each -> the same, and of each its scale and shift, and its moments.

    Args:
        ys: Raw values, as convolutions leave them.
        weights: Of the batch norms, float32.
        biases: Of the batch norms.
        lengths: (batch,) int32: frames behind them are zero in the output; they count in the statistics nevertheless.
        seed: (2,) int32, from which dropout follows; None without.
        dropout: Share of the activations that become zero, as near as 16 bits come to it.
        eps: Of the batch norms.
        takes_places: The gradient of an input that is a part of a larger tensor overwrites it: nobody else may need it,
            and there is one backward only.

    Returns:
        Activations; (number, 2, channels) scale and shift; (number, 3, channels) mean, 1 / standard deviation,
        unbiased variance. Only the first has a gradient.
    """
    y = ys[0]
    dtype = torch.promote_types(y.dtype, torch.float32)
    affine = torch.empty(len(ys), 2, y.shape[-1], dtype=dtype, device=y.device)
    moments = torch.empty(len(ys), 3, y.shape[-1], dtype=dtype, device=y.device)
    if y.is_cuda:
        from paceline.speed.layers.kernels import rows

        rows.statistics(ys, weights, biases, eps, affine, moments)
        return rows.join(ys, affine, lengths, seed, short_threshold(dropout), short_factor(dropout)), affine, moments
    for each, weight, bias, scales, found in zip(ys, weights, biases, affine, moments, strict=True):
        variance, mean = torch.var_mean(each.to(dtype), (0, 1), correction=0)
        count = each.shape[0] * each.shape[1]
        inverse = torch.rsqrt(variance + eps)
        scales.copy_(torch.stack([weight * inverse, bias - mean * weight * inverse]))
        found.copy_(torch.stack([mean, inverse, variance * (count / max(count - 1, 1))]))
    total = y.new_zeros(y.shape, dtype=dtype)
    for each, (scale, shift) in zip(ys, affine, strict=True):
        total += each.to(dtype) * scale + shift
    total = total.relu_() * _held(lengths, y)
    if seed is not None:
        total = torch.where(kept_of_pairs(seed, y.shape, dropout), total * short_factor(dropout), 0.0)
    return total.to(y.dtype), affine, moments


@row_norm.register_fake
def _(
    ys: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    lengths: Optional[Tensor],
    seed: Optional[Tensor],
    dropout: float,
    eps: float,
    takes_places: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y = ys[0]
    dtype = torch.promote_types(y.dtype, torch.float32)
    affine, moments = (y.new_empty(len(ys), count, y.shape[-1], dtype=dtype) for count in (2, 3))
    return y.new_empty(y.shape), affine, moments


@operator("row_norm_backward")
def row_norm_backward(
    g: Tensor,
    ys: list[Tensor],
    out: Tensor,
    affine: Tensor,
    moments: Tensor,
    lengths: Optional[Tensor],
    dropout: float,
) -> list[Tensor]:
    """Gradients of all `ys`, then (number, channels) of the weights and of the biases."""
    ys = [y.contiguous() for y in ys]
    of_ys = [torch.empty_like(y) for y in ys]
    return [*of_ys, *_backward(g, ys, out, affine, moments, lengths, dropout, of_ys)]


@row_norm_backward.register_fake
def _(
    g: Tensor,
    ys: list[Tensor],
    out: Tensor,
    affine: Tensor,
    moments: Tensor,
    lengths: Optional[Tensor],
    dropout: float,
) -> list[Tensor]:
    of_norms = [affine.new_empty(len(ys), g.shape[-1]) for _ in range(2)]
    return [*(y.new_empty(y.shape) for y in ys), *of_norms]


def _backward(
    g: Tensor,
    ys: Sequence[Tensor],
    out: Tensor,
    affine: Tensor,
    moments: Tensor,
    lengths: Tensor | None,
    dropout: float,
    of_ys: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Write the gradients of all `ys`, which may take their places; return those of the weights and of the biases."""
    if g.is_cuda:
        from paceline.speed.layers.kernels import rows

        return rows.join_backward(g, out, ys, affine, moments, lengths, short_factor(dropout), of_ys)
    h = torch.where(out > 0, g.to(affine.dtype) * short_factor(dropout), 0.0) * _held(lengths, g)
    count = g.shape[0] * g.shape[1]
    level = h.sum((0, 1))
    of_weights = []
    for y, (scale, _), (mean, inverse, _), of_y in zip(ys, affine, moments, of_ys, strict=True):
        away = y.to(affine.dtype) - mean
        of_weights.append((h * away).sum((0, 1)) * inverse)
        of_y.copy_(scale * (h - level / count - away * of_weights[-1] * inverse / count))
    return torch.stack(of_weights), torch.stack([level] * len(ys))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ys, _, _, lengths, seed, dropout, _, takes_places = inputs
    ctx.save_for_backward(*output, lengths, *ys)
    ctx.dropout = 0.0 if seed is None else dropout
    ctx.takes_places = takes_places and not all(y.is_contiguous() for y in ys)
    ctx.is_spent = False
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *_: None) -> tuple[Any, ...]:
    out, affine, moments, lengths, *ys = ctx.saved_tensors
    num = len(ys)
    if g is None:
        return ([None] * num, [None] * num, [None] * num, None, None, None, None, None)
    inputs = g.contiguous(), ys, out, affine, moments, lengths, ctx.dropout
    if not ctx.takes_places:
        *of_ys, of_weights, of_biases = row_norm_backward(*inputs)
    elif ctx.is_spent or torch.is_grad_enabled():  # the latter for gradients of these gradients
        raise TaskContract(
            "backward again through residuals whose gradients have replaced them (`-O4`, `auto` on a GPU)",
            hint="call backward once for each forward, or type `-O2`",
        )
    else:
        of_ys = [torch.empty_like(y) if y.is_contiguous() else y.data for y in ys]
        of_weights, of_biases = _backward(*inputs, of_ys)
        ctx.is_spent = True
    return of_ys, list(of_weights.unbind()), list(of_biases.unbind()), None, None, None, None, None


row_norm.register_autograd(_gradients, setup_context=_setup)


def threshold(dropout: float) -> int:
    """Of 32 random bits: those below it are dropped."""
    return min(round(dropout * 2**32), 2**32 - 1)


def factor(dropout: float) -> float:
    """Return what an activation that is kept is multiplied with."""
    return 1.0 / (1.0 - dropout)


def kept(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """Activations that dropout leaves: those whose number, mixed with the seed, is not below a threshold."""
    number = torch.arange(shape.numel(), dtype=torch.int64, device=seed.device)
    return (_drawn(seed, number) >= threshold(dropout)).view(shape)


def short_threshold(dropout: float) -> int:
    """Of 16 random bits: those below it are dropped."""
    return min(round(dropout * 2**16), 2**16 - 1)


def short_factor(dropout: float) -> float:
    """Return what an activation that is kept is multiplied with, by the share that is really dropped."""
    return 2**16 / (2**16 - short_threshold(dropout))


def kept_of_pairs(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """Activations that dropout leaves, where two neighbouring channels share 32 random bits: half of the arithmetic."""
    pairs = -(-shape[-1] // 2)
    rows = shape.numel() // shape[-1]
    number = torch.arange(rows * pairs, dtype=torch.int64, device=seed.device)
    drawn = _drawn(seed, number)
    halves = torch.stack([drawn & 0xFFFF, drawn >> 16], -1).view(rows, 2 * pairs)[:, : shape[-1]]
    return (halves >= short_threshold(dropout)).reshape(shape)


def _drawn(seed: Tensor, number: Tensor) -> Tensor:
    """32 random bits for each number."""
    first, second = (seed.to(torch.int64) & 0xFFFFFFFF).unbind()
    return _mixed((_mixed(number ^ first) + second) & 0xFFFFFFFF)


def _mixed(x: Tensor) -> Tensor:
    """As in the kernel; 64 bits hold a product of 32 and 32, and what overflows is above those that count."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _held(lengths: Tensor | None, y: Tensor) -> Tensor:
    """(batch, time, 1): frames that belong to their utterance."""
    if lengths is None:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=y.device)
    return (torch.arange(y.shape[1], device=y.device) < lengths.unsqueeze(1)).unsqueeze(2)
