"""Attention with relative positions as a function of tensors: our kernels on a GPU, the same in PyTorch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.recipes.speech.kernels.conformer.residual_norm import kept
from paceline.speed.layers.kernels.row_norm import factor, threshold


def attend(
    qkv: Tensor,
    p: Tensor,
    bias_u: Tensor,
    bias_v: Tensor,
    lengths: Tensor,
    seed: Tensor | None,
    dropout: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, time, 3 * width) -> (batch, time, width), and two tensors that backward wants.

    Args:
        qkv: Queries, keys and values side by side.
        p: (2 * time - 1, width) of positions from time - 1 ahead to time - 1 behind; rows may lie apart.
        bias_u: (width,) added to queries that meet keys.
        bias_v: (width,) added to queries that meet positions.
        lengths: (batch,) int32: what is behind is not seen, and is zero in the output.
        seed: (2,) int32, from which dropout of the shares follows; None without.
        dropout: Share of the shares that become zero.
        heads: Width is divided among them.
    """
    if qkv.is_cuda:
        from paceline.recipes.speech.kernels.conformer import relative

        return relative.forward(qkv, p, bias_u, bias_v, lengths, seed, threshold(dropout), factor(dropout), heads)
    shares, kept_shares = _shares(qkv, p, bias_u, bias_v, lengths, seed, dropout, heads)
    values = _heads(qkv, heads)[2]
    out = (kept_shares @ values).transpose(1, 2).flatten(2)
    return out.to(qkv.dtype), shares, kept_shares


def attend_backward(
    g: Tensor,
    qkv: Tensor,
    p: Tensor,
    bias_u: Tensor,
    bias_v: Tensor,
    lengths: Tensor,
    seed: Tensor | None,
    dropout: float,
    heads: int,
    out: Tensor,
    *saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, (2, width) of u and v, and those of the scores, for `places_backward`."""
    if g.is_cuda:
        from paceline.recipes.speech.kernels.conformer import relative

        return relative.backward(
            g, qkv, p, bias_u, bias_v, lengths, seed, threshold(dropout), factor(dropout), heads, out, *saved
        )
    shares, kept_shares = saved
    wide = shares.dtype
    width = g.shape[-1]
    q, k, v = _heads(qkv, heads)
    upper = g.to(wide).unflatten(2, (heads, -1)).transpose(1, 2)
    of_values = kept_shares.mT @ upper
    of_kept = upper @ v.mT
    if seed is not None:
        of_kept = of_kept * kept(seed, shares.shape, dropout) * factor(dropout)
    delta = (of_kept * shares).sum(-1, keepdim=True)
    slopes = shares * (of_kept - delta) * (width // heads) ** -0.5
    by_content = slopes @ k
    of_keys = slopes.mT @ (q + bias_u.to(wide).view(heads, 1, -1))
    at_places = _at_places(slopes)
    places = p.to(wide).unflatten(1, (heads, -1)).transpose(0, 1)
    by_place = at_places @ places
    of_qkv = torch.stack([by_content + by_place, of_keys, of_values], 2).permute(0, 3, 2, 1, 4).flatten(2)
    biases = torch.stack([each.sum((0, 2)).flatten() for each in (by_content, by_place)])
    return of_qkv.to(qkv.dtype), biases, slopes


def places_backward(slopes: Tensor, qkv: Tensor, bias_v: Tensor, lengths: Tensor, heads: int) -> Tensor:
    """Gradient of p, float32 at least, from what `attend_backward` says of the scores."""
    if qkv.is_cuda:
        from paceline.recipes.speech.kernels.conformer import relative

        return relative.backward_places(slopes, qkv, bias_v, lengths, heads)
    q = _heads(qkv, heads)[0] + bias_v.to(slopes.dtype).view(heads, 1, -1)
    return torch.einsum("bhim,bhid->mhd", _at_places(slopes), q).flatten(1)


def _at_places(slopes: Tensor) -> Tensor:
    """(batch, heads, time, 2 * time - 1): at the position that a key is seen at."""
    time = slopes.shape[-1]
    places = _place(time, slopes.device).expand_as(slopes)
    return slopes.new_zeros(*slopes.shape[:3], 2 * time - 1).scatter(3, places, slopes)


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three times (batch, heads, time, width of a head), in float32 at least."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(wide).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def _place(time: int, device: torch.device) -> Tensor:
    """(time, time): row of `p` for query i and key j."""
    each = torch.arange(time, device=device)
    return (time - 1) - each[:, None] + each


def _shares(
    qkv: Tensor,
    p: Tensor,
    bias_u: Tensor,
    bias_v: Tensor,
    lengths: Tensor,
    seed: Tensor | None,
    dropout: float,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Return the weights of keys for each query, before and after dropout."""
    q, k, _ = _heads(qkv, heads)
    wide, time = q.dtype, q.shape[2]
    places = p.to(wide).unflatten(1, (heads, -1)).transpose(0, 1)
    by_place = (q + bias_v.to(wide).view(heads, 1, -1)) @ places.mT
    scores = (q + bias_u.to(wide).view(heads, 1, -1)) @ k.mT
    scores = scores + by_place.gather(3, _place(time, q.device).expand(*q.shape[:2], -1, -1))
    held = torch.arange(time, device=q.device) < lengths[:, None]
    scores = (scores * q.shape[-1] ** -0.5).masked_fill(~held[:, None, None, :], float("-inf"))
    shares = torch.where(held[:, None, :, None] & held[:, None, None, :], torch.softmax(scores, -1), 0.0)
    if seed is None:
        return shares, shares
    return shares, shares * kept(seed, shares.shape, dropout) * factor(dropout)
