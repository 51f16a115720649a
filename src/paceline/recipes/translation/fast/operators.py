"""Parts of a Transformer on (tokens, width) with gradients of their own: the products with what is joined to them.

Weights come twice: as parameters, which get their gradients in float32 at least, and rounded to the dtype of the
activations, once in a pass for forward and backward. Biases of layers before a norm are added with it, and their
gradients are made with its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from paceline.core.torch_private import relu_of_product
from paceline.speed.layers.added_norm import added_norm, added_norm_backward
from paceline.speed.layers.kernels.row_norm import factor, threshold
from paceline.speed.layers.occurrences import Occurrences, add_rows
from paceline.speed.layers.packed_attention import Packing, has_kernel, packed_attention
from paceline.speed.layers.products import wide_product


class Narrow(NamedTuple):
    """A weight (out, in) and a bias (out) in the dtype of the activations."""

    weight: Tensor
    bias: Tensor


class Joint(NamedTuple):
    """Dropout, residual and layer norm behind a part."""

    weight: Tensor
    bias: Tensor
    eps: float
    rate: float
    seed: Tensor | None
    """(2,) int32; None without dropout."""


def summed(g: Tensor) -> Tensor:
    """(tokens, out) -> (out), the gradient of a bias."""
    if g.is_cuda and g.dtype in (torch.bfloat16, torch.float16):
        from paceline.recipes.translation.kernels.column_sums import column_sums

        return column_sums(g)
    return g.sum(0)


class Linear(Function):
    """`Linear.apply(x, weight, bias, narrow)`"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, narrow: Narrow) -> Tensor:
        ctx.save_for_backward(x, narrow.weight)
        return torch.addmm(narrow.bias, x, narrow.weight.T)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, wide_product(g, x), summed(g), None


class Gradients:
    """Gradients of several parts side by side in one tensor, so that nobody has to join them."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def part(self, number: int, parts: int, like: Tensor) -> Tensor:
        """Return the place of one of them, (rows, width)."""
        rows, width = like.shape
        if self._whole is None:
            self._whole = torch.empty(rows, parts * width, dtype=like.dtype, device=like.device)
        return self._whole[:, number * width : (number + 1) * width]

    def take(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Return all of them side by side, and forget them."""
        whole, self._whole = self._whole, None
        width = gradients[0].shape[1]
        if whole is not None and all(
            each.data_ptr() == whole[:, number * width :].data_ptr() and each.stride() == whole.stride()
            for number, each in enumerate(gradients)
        ):
            return whole
        return torch.cat(gradients, 1)


class SeveralLinear(Function):
    """Several layers of one input, as one product: `SeveralLinear.apply(x, narrow, gradients, *weights, *biases)`.

    The rounded weights lie one below the other. Returns a tuple of (tokens, out).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, narrow: Narrow, gradients: Gradients, *wide: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, narrow.weight)
        ctx.gradients, ctx.num = gradients, len(wide) // 2
        return torch.addmm(narrow.bias, x, narrow.weight.T).chunk(ctx.num, 1)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g = ctx.gradients.take(gs)
        return g @ weight, None, None, *wide_product(g, x).chunk(ctx.num), *summed(g).chunk(ctx.num)


class _SelfAttention(Function):
    """Attention by our kernels, of queries, keys and values that lie beside each other: one gradient of all three."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, packing: Packing, heads: int, is_causal: bool) -> Tensor:
        from paceline.speed.layers.kernels import packed_rows

        query, key, value = _heads(joined, 3, heads)
        given = packing.offsets, packing.offsets, packing.longest, is_causal, query.shape[-1] ** -0.5
        out, logs = packed_rows.forward(query, key, value, *given)
        ctx.save_for_backward(joined, out, logs, packing.offsets)
        ctx.heads, ctx.given = heads, given[2:]
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        from paceline.speed.layers.kernels import packed_rows

        joined, out, logs, offsets = ctx.saved_tensors
        of_joined = torch.empty_like(joined)
        query, key, value = _heads(joined, 3, ctx.heads)
        of_query, of_key, of_value = _heads(of_joined, 3, ctx.heads)
        upper = _heads(g, 1, ctx.heads)[0]
        packed_rows.backward(
            upper, query, key, value, out, logs, of_query, of_key, of_value, offsets, offsets, *ctx.given
        )
        return of_joined, None, None, None


class _AttentionTo(Function):
    """Attention by our kernels to keys and values that lie beside each other, among those of other layers."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, joined: Tensor, packing: Packing, keys: Packing, heads: int, where: Where
    ) -> Tensor:
        from paceline.speed.layers.kernels import packed_rows

        (query,), (key, value) = _heads(query, 1, heads), _heads(joined, 2, heads)
        longest = max(packing.longest, keys.longest)
        given = packing.offsets, keys.offsets, longest, False, query.shape[-1] ** -0.5
        out, logs = packed_rows.forward(query, key, value, *given)
        ctx.save_for_backward(query, joined, out, logs, packing.offsets, keys.offsets)
        ctx.heads, ctx.given, ctx.where = heads, given[2:], where
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        from paceline.speed.layers.kernels import packed_rows

        query, joined, out, logs, *offsets = ctx.saved_tensors
        of_query, of_joined = torch.empty_like(query), ctx.where.place(joined)
        (key, value), (of_key, of_value) = _heads(joined, 2, ctx.heads), _heads(of_joined, 2, ctx.heads)
        upper = _heads(g, 1, ctx.heads)[0]
        packed_rows.backward(upper, query, key, value, out, logs, of_query, of_key, of_value, *offsets, *ctx.given)
        return of_query.flatten(1), of_joined, None, None, None, None


class Where(NamedTuple):
    """Place of a layer's gradient among those of others."""

    gradients: Gradients
    number: int
    parts: int

    def place(self, like: Tensor) -> Tensor:
        return self.gradients.part(self.number, self.parts, like)


def _heads(joined: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(tokens, parts * width) -> of each part (tokens, heads, width / heads)."""
    each: tuple[Tensor, ...] = joined.unflatten(-1, (parts, heads, -1)).unbind(1)
    return each


def self_attention(joined: Tensor, packing: Packing, heads: int, *, is_causal: bool) -> Tensor:
    """(tokens, 3 * width): queries, keys and values -> (tokens, width)."""
    query, key, value = _heads(joined, 3, heads)
    if has_kernel(query):
        out: Tensor = _SelfAttention.apply(joined, packing, heads, is_causal)  # type: ignore[no-untyped-call]
        return out
    return packed_attention(query, key, value, packing, is_causal=is_causal).flatten(1)


def attention_to(query: Tensor, joined: Tensor, packing: Packing, keys: Packing, heads: int, where: Where) -> Tensor:
    """(tokens, width) and (source tokens, 2 * width): keys and values -> (tokens, width)."""
    (queries,), (key, value) = _heads(query, 1, heads), _heads(joined, 2, heads)
    if has_kernel(queries):
        out: Tensor = _AttentionTo.apply(query, joined, packing, keys, heads, where)  # type: ignore[no-untyped-call]
        return out
    return packed_attention(queries, key, value, packing, key_packing=keys).flatten(1)


class LinearNorm(Function):
    """A linear layer, dropout, residual and layer norm: (the norm of the sum, the sum).

    `LinearNorm.apply(x, weight, bias, narrow_weight, residual, norm_weight, norm_bias, joint)`
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        narrow: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        joint: Joint,
    ) -> tuple[Tensor, Tensor]:
        change = x @ narrow.T
        normed, total, moments = added_norm(
            change, bias, residual, norm_weight, norm_bias, joint.seed, joint.rate, joint.eps
        )
        ctx.save_for_backward(x, narrow, total, moments, norm_weight, joint.seed)
        ctx.rate = joint.rate
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_total: Tensor | None) -> Any:
        x, narrow, total, moments, norm_weight, seed = ctx.saved_tensors
        of_change, of_residual, sums = _norm_backward(g, g_total, total, moments, norm_weight, seed, ctx.rate)
        of_norm, of_norm_bias, of_bias = sums.unbind()
        return (
            of_change @ narrow,
            wide_product(of_change, x),
            of_bias,
            None,
            of_residual,
            of_norm,
            of_norm_bias,
            None,
        )


class FeedForwardNorm(Function):
    """Two linear layers with a ReLU between them, dropout, residual and layer norm: (the norm of the sum, the sum)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        narrow1: Narrow,
        narrow2: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        joint: Joint,
    ) -> tuple[Tensor, Tensor]:
        hidden = relu_of_product(narrow1.bias, x, narrow1.weight.T)
        normed, total, moments = added_norm(
            hidden @ narrow2.T, bias2, residual, norm_weight, norm_bias, joint.seed, joint.rate, joint.eps
        )
        ctx.save_for_backward(x, hidden, narrow1.weight, narrow2, total, moments, norm_weight, joint.seed)
        ctx.rate = joint.rate
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_total: Tensor | None) -> Any:
        x, hidden, narrow1, narrow2, total, moments, norm_weight, seed = ctx.saved_tensors
        of_change, of_residual, sums = _norm_backward(g, g_total, total, moments, norm_weight, seed, ctx.rate)
        of_norm, of_norm_bias, of_bias2 = sums.unbind()
        of_weight2 = wide_product(of_change, hidden)
        of_hidden = of_change @ narrow2
        of_hidden, of_bias1 = _relu_backward(of_hidden, hidden)
        return (
            of_hidden @ narrow1,
            wide_product(of_hidden, x),
            of_bias1,
            of_weight2,
            of_bias2,
            None,
            None,
            of_residual,
            of_norm,
            of_norm_bias,
            None,
        )


def _relu_backward(g: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient before a ReLU, and its sums over tokens."""
    if g.is_cuda and g.dtype in (torch.bfloat16, torch.float16):
        from paceline.recipes.translation.kernels.column_sums import relu_backward

        return g, relu_backward(g, out)
    g = torch.where(out > 0, g, 0.0)
    return g, g.sum(0)


def _norm_backward(
    g: Tensor | None,
    g_total: Tensor | None,
    total: Tensor,
    moments: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    of_normed = torch.zeros_like(total) if g is None else g.contiguous()
    further = None if g_total is None else g_total.contiguous()
    of_change, of_residual, sums = added_norm_backward(of_normed, further, total, moments, weight, seed, rate)
    return of_change, of_residual, sums.to(weight.dtype)


class TableGradient:
    """Gradient of a table that several parts have: the first brings it, the last returns it, all add to it in place."""

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._sum: Tensor | None = None

    def bring(self, gradient: Tensor) -> Tensor | None:
        """Begin with this one; return it if there are no further parts."""
        self._left -= 1
        self._sum = gradient
        return gradient if not self._left else None

    def add(self, like: Tensor, tokens: Tensor, rows: Tensor, occurrences: Occurrences, scale: float) -> Tensor | None:
        """Add rows to those of their tokens; return the sum if that is all."""
        if self._sum is None:
            self._sum = torch.zeros_like(like)
        add_rows(self._sum, tokens, rows, occurrences, scale)
        self._left -= 1
        return self._sum if not self._left else None


class Place(NamedTuple):
    """Tokens of an embedding, and where they are."""

    tokens: Tensor
    packing: Packing
    occurrences: Occurrences
    positions: Tensor
    """(longest or more, width)"""
    scale: float
    """Of the embedding's rows."""
    gradient: TableGradient


class EmbeddingNorm(Function):
    """Rows of an embedding with positions and dropout, and their layer norm: (the norm, the rows).

    `EmbeddingNorm.apply(table, norm_weight, norm_bias, place, joint, dtype)`
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, norm_weight: Tensor, norm_bias: Tensor, place: Place, joint: Joint, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        longest, places = max(1, place.packing.longest), place.packing.places
        if table.is_cuda:
            from paceline.speed.layers.kernels import embedded_rows

            normed, total, moments = embedded_rows.forward(
                table, place.tokens, places, place.positions, norm_weight, norm_bias, joint.seed, longest, place.scale,
                threshold(joint.rate), factor(joint.rate), joint.eps, dtype,
            )  # fmt: skip
        else:
            positions = place.positions[places % longest].to(table.dtype)
            rows = (F.embedding(place.tokens, table) * place.scale + positions).to(dtype)
            normed, total, moments = added_norm(
                rows, None, torch.zeros_like(rows), norm_weight, norm_bias, joint.seed, joint.rate, joint.eps
            )
        ctx.save_for_backward(table, total, moments, norm_weight, joint.seed)
        ctx.place, ctx.rate = place, joint.rate
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_total: Tensor | None) -> Any:
        table, total, moments, norm_weight, seed = ctx.saved_tensors
        place = ctx.place
        of_rows, _, sums = _norm_backward(g, g_total, total, moments, norm_weight, seed, ctx.rate)
        of_table = place.gradient.add(table, place.tokens, of_rows, place.occurrences, place.scale)
        return of_table, sums[0], sums[1], None, None, None


class Brought(Function):
    """A table for its last use in forward, which is the first in backward: that brings the gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, gradient: TableGradient) -> Tensor:
        ctx.gradient = gradient
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.gradient.bring(g), None
