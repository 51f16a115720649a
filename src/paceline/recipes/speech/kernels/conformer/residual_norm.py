"""Rows of a residual network as functions of tensors: our kernels on a GPU, the same in PyTorch elsewhere.

Sums over rows are parts of a matrix that the caller has: `GROUPS` rows, of which each function fills some columns, so
that a layer adds up all of its sums at once. On a CPU the first row has the sums and the others are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.speed.layers.kernels.row_norm import _mixed, factor, threshold

GROUPS = 264
"""Rows of a matrix of sums."""
Norm = tuple[Tensor, Tensor]
"""Weight and bias of a layer norm."""


def forward(
    x: Tensor,
    residual: Tensor | None,
    norms: Sequence[Norm],
    seed: Tensor | None,
    dropout: float,
    scale: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the sum residual + scale * dropout(x), moments for backward, and its layer norm.

    With two `norms` also the second norm of the first. All are (..., width); the norms' weights are float32 at least.
    `seed` is (2,) int32, from which dropout follows; None without.
    """
    times = scale * factor(dropout) if seed is not None else scale
    if x.is_cuda:
        from paceline.recipes.speech.kernels.conformer import residual_rows

        return residual_rows.forward(x, residual, list(norms), seed, threshold(dropout), times, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) * times
    if seed is not None:
        total = torch.where(kept(seed, x.shape, dropout), total, 0.0)
    if residual is not None:
        total = total + residual.to(wide)
    total = total.to(x.dtype)
    moments = torch.zeros(total[..., 0].numel(), 4, dtype=wide, device=x.device)
    outs = [total]
    for number, (weight, bias) in enumerate(norms):
        value = outs[-1].to(wide)
        variance, mean = torch.var_mean(value, -1, correction=0, keepdim=True)
        inverse = torch.rsqrt(variance + eps)
        moments[:, 2 * number] = mean.flatten()
        moments[:, 2 * number + 1] = inverse.flatten()
        outs.append(((value - mean) * inverse * weight + bias).to(x.dtype))
    return total, moments, *outs[1:]


def backward(
    g: Tensor,
    g_more: Tensor | None,
    total: Tensor,
    moments: Tensor,
    norms: Sequence[Norm],
    seed: Tensor | None,
    dropout: float,
    scale: float,
    has_residual: bool,
    parts: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of x and of the residual; columns of `parts`: sums for weight and bias of the first norm, of
    the gradient of x, and for the second norm.

    `g` is the gradient of the last norm, `g_more` that of the sum with one norm, that of the first norm with two.
    """
    times = scale * factor(dropout) if seed is not None else scale
    if g.is_cuda:
        from paceline.recipes.speech.kernels.conformer import residual_rows

        return residual_rows.backward(
            g, g_more, total, moments, list(norms), seed, threshold(dropout), times, has_residual, parts
        )
    wide = moments.dtype
    width = total.shape[-1]
    shape = (*total.shape[:-1], 1)
    away = (total.to(wide) - moments[:, 0].view(shape)) * moments[:, 1].view(shape)
    upper = g.to(wide)
    sums: list[Tensor] = []
    (weight, bias), (weight_2, _) = norms[0], norms[-1]
    if len(norms) > 1:
        normed = (away * weight + bias).to(total.dtype).to(wide)
        away_2 = (normed - moments[:, 2].view(shape)) * moments[:, 3].view(shape)
        sums = [_over_rows(upper * away_2), _over_rows(upper)]
        upper = _slope(upper, away_2, weight_2, moments[:, 3].view(shape))
        if g_more is not None:
            upper = upper + g_more.to(wide)
    of_total = _slope(upper, away, weight, moments[:, 1].view(shape))
    if g_more is not None and len(norms) == 1:
        of_total = of_total + g_more.to(wide)
    of_x = of_total * times
    if seed is not None:
        of_x = torch.where(kept(seed, of_x.shape, dropout), of_x, 0.0)
    sums = [_over_rows(upper * away), _over_rows(upper), _over_rows(of_x), *sums]
    parts.zero_()[0, : len(sums) * width] = torch.cat(sums)
    return of_x.to(total.dtype), of_total.to(total.dtype) if has_residual else None


def swish(x: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """Return dropout(x * sigmoid(x)); (..., width)."""
    times = factor(dropout) if seed is not None else 1.0
    if x.is_cuda:
        from paceline.recipes.speech.kernels.conformer import residual_rows

        return residual_rows.swish(x, seed, threshold(dropout), times)
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    value = value * value.sigmoid() * times
    if seed is not None:
        value = torch.where(kept(seed, x.shape, dropout), value, 0.0)
    return value.to(x.dtype)


def swish_backward(g: Tensor, x: Tensor, seed: Tensor | None, dropout: float, parts: Tensor) -> Tensor:
    """Return the gradient of x; columns of `parts` get its sums."""
    times = factor(dropout) if seed is not None else 1.0
    if x.is_cuda:
        from paceline.recipes.speech.kernels.conformer import residual_rows

        return residual_rows.swish_backward(g, x, seed, threshold(dropout), times, parts)
    wide = torch.promote_types(x.dtype, torch.float32)
    value, upper = x.to(wide), g.to(wide) * times
    opened = value.sigmoid()
    found = upper * (opened + value * opened * (1 - opened))
    if seed is not None:
        found = torch.where(kept(seed, x.shape, dropout), found, 0.0)
    parts.zero_()[0] = _over_rows(found)
    return found.to(x.dtype)


def column_sums(x: Tensor, parts: Tensor) -> None:
    """Columns of `parts` get the sums of all rows of x."""
    if x.is_cuda:
        from paceline.recipes.speech.kernels.conformer import residual_rows

        residual_rows.column_sums(x, parts)
        return
    parts.zero_()[0] = _over_rows(x.to(torch.promote_types(x.dtype, torch.float32)))


def kept(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """Numbers that dropout leaves, of shape (..., width).

    A row's number is mixed with the seed; a column's number is added to that and mixed once more: half the work of
    mixing every number twice.
    """
    rows = torch.arange(shape[:-1].numel(), dtype=torch.int64, device=seed.device)
    first, second = (seed.to(torch.int64) & 0xFFFFFFFF).unbind()
    bits = _mixed((_mixed(rows ^ first) + second) & 0xFFFFFFFF)
    columns = torch.arange(shape[-1], dtype=torch.int64, device=seed.device)
    return (_mixed((bits[:, None] + columns) & 0xFFFFFFFF) >= threshold(dropout)).view(shape)


def _slope(upper: Tensor, away: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    steep = upper * weight
    return inverse * (steep - steep.mean(-1, keepdim=True) - away * (steep * away).mean(-1, keepdim=True))


def _over_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0)
