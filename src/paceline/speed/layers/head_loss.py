"""Last layer and cross-entropy in one operator: the logits of all tokens are never in memory at once.

Tokens go through in chunks. Where gradients are wanted they are computed with the logits of their chunk, in forward, so
that nothing is computed twice; backward multiplies them by what comes from above. Losses and the sums of the weight
gradient are in float32 at least.
"""

# ruff: noqa: UP045 (the schema of an operator is read off these signatures, in which torch wants Optional)
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import InvalidData, InvalidSetting
from paceline.core.units import counted
from paceline.speed.layers.kernels import ways
from paceline.speed.operators import operator

MOST_LOGITS = 2**27
"""Logits of a chunk, where its size is not given."""


@operator("linear_cross_entropy")
def _head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    target: Tensor,
    dtype: torch.dtype,
    label_smoothing: float,
    ignore_index: int,
    chunk: int,
    has_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, width), (vocabulary, width), (tokens,) -> loss of each token, and gradients of their sum.

    Gradients of hidden, weight and bias, empty without `has_gradients` (that of the bias also without a bias).
    """
    wide = torch.promote_types(dtype, torch.float32)
    num_tokens, vocabulary = len(hidden), len(weight)
    losses = torch.zeros(num_tokens, dtype=wide, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if has_gradients else hidden.new_empty(0)
    sums = torch.promote_types(weight.dtype, torch.float32)
    of_weight: Tensor | None = None
    of_bias = torch.zeros(vocabulary if has_gradients and bias is not None else 0, dtype=sums, device=weight.device)
    rows = weight.to(dtype)
    fused = _has_kernel(hidden, dtype, bias)
    for start in range(0, num_tokens, chunk):
        x, y = hidden[start : start + chunk].to(dtype), target[start : start + chunk]
        part = losses[start : start + chunk]
        if fused:
            slope = _fused_slope(x, rows, y, part, label_smoothing, ignore_index, has_gradients)
        else:
            slope = _slope(x, rows, bias, y, part, label_smoothing, ignore_index, has_gradients)
        if not has_gradients:
            continue
        if bias is not None:
            of_bias += slope.sum(0)
        narrow = slope.to(dtype)
        if of_hidden.dtype == dtype:
            torch.mm(narrow, rows, out=of_hidden[start : start + chunk])
        else:
            of_hidden[start : start + chunk] = narrow @ rows
        of_weight = _added_product(of_weight, narrow, x, sums)
    if of_weight is None:
        of_weight = torch.zeros(weight.shape if has_gradients else 0, dtype=sums, device=weight.device)
    return losses, of_hidden, of_weight.to(weight.dtype), of_bias.to(weight.dtype if bias is None else bias.dtype)


def _slope(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    target: Tensor,
    losses: Tensor,
    label_smoothing: float,
    ignore_index: int,
    has_gradients: bool,
) -> Tensor:
    """Write the losses of a chunk, and return the gradient of its logits where that is wanted."""
    vocabulary, wide = len(rows), losses.dtype
    is_counted = target != ignore_index
    place = torch.where(is_counted, target, 0).unsqueeze(1)
    logits = (x @ rows.T).to(wide)
    if bias is not None:
        logits += bias
    total = torch.logsumexp(logits, 1)
    loss = total - (1.0 - label_smoothing) * logits.gather(1, place).squeeze(1)
    if label_smoothing:
        loss -= label_smoothing / vocabulary * logits.sum(1)
    losses.copy_(torch.where(is_counted, loss, 0.0))
    if not has_gradients:
        return logits
    slope = logits.sub_(total.unsqueeze(1)).exp_()
    if label_smoothing:
        slope -= label_smoothing / vocabulary
    slope.scatter_add_(1, place, torch.full_like(place, label_smoothing - 1.0, dtype=wide))
    slope *= is_counted.unsqueeze(1)
    return slope


def _fused_slope(
    x: Tensor,
    rows: Tensor,
    target: Tensor,
    losses: Tensor,
    label_smoothing: float,
    ignore_index: int,
    has_gradients: bool,
) -> Tensor:
    """As `_slope`, by a kernel that reads logits and writes their gradient in place."""
    from paceline.speed.layers.kernels import score_rows

    logits = x @ rows.T
    score_rows.cross_entropy(logits, target, losses, label_smoothing, ignore_index, has_gradients)
    return logits


def _has_kernel(hidden: Tensor, dtype: torch.dtype, bias: Tensor | None) -> bool:
    return hidden.is_cuda and ways.in_use().scores and bias is None and dtype in (torch.bfloat16, torch.float16)


def _added_product(so_far: Tensor | None, slope: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum so far, in this dtype, and slope.T @ x; on a GPU half types are added up in float32."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        if so_far is None:
            return torch.mm(slope.T, x, out_dtype=torch.float32)
        return torch.addmm(so_far, slope.T, x, out_dtype=torch.float32)
    product = (slope.T @ x).to(dtype)
    return product if so_far is None else so_far.add_(product)


@_head_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    target: Tensor,
    dtype: torch.dtype,
    label_smoothing: float,
    ignore_index: int,
    chunk: int,
    has_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    of_hidden = torch.empty_like(hidden) if has_gradients else hidden.new_empty(0)
    of_weight = weight.new_empty(weight.shape if has_gradients else 0)
    like = weight if bias is None else bias
    of_bias = like.new_empty(len(weight) if has_gradients and bias is not None else 0)
    return hidden.new_empty(len(hidden), dtype=wide), of_hidden, of_weight, of_bias


class _Sum(torch.autograd.Function):
    """Sum of the losses, with the gradients that forward has made."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        label_smoothing: float,
        ignore_index: int,
        chunk: int,
    ) -> Tensor:
        wants = any(ctx.needs_input_grad[:3])
        losses, *gradients = _head_loss(
            hidden, weight, bias, target, dtype, label_smoothing, ignore_index, chunk, wants
        )
        ctx.save_for_backward(*gradients)
        ctx.has_bias = bias is not None
        total: Tensor = losses.sum()
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        scaled = [
            (each * g).to(each.dtype) if is_wanted else None
            for each, is_wanted in zip((of_hidden, of_weight, of_bias), wanted[:3], strict=True)
        ]
        return scaled[0], scaled[1], scaled[2] if ctx.has_bias else None, None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (sum of the losses, number of tokens that count), as a task's `loss` does.

    The same as `F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum", ...)`, with `hidden`
    (..., width) and `target` (...). Products are in autocast's dtype where that is on. `chunk` is how many tokens go
    through at a time; as many as make 2**27 logits if not given.
    """
    tokens, labels = hidden.reshape(-1, hidden.shape[-1]), target.flatten()
    _check(tokens, labels, label_smoothing, chunk)
    size = chunk or max(1, MOST_LOGITS // len(weight))
    arguments = tokens, weight, bias, labels, _product_dtype(hidden), label_smoothing, ignore_index, size
    total: Tensor = _Sum.apply(*arguments)  # type: ignore[no-untyped-call]
    return total, (labels != ignore_index).sum()


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Return autocast's dtype where that is on; as PyTorch's own layers, it leaves float64 alone."""
    device = hidden.device.type
    is_cast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else hidden.dtype


def _check(tokens: Tensor, labels: Tensor, label_smoothing: float, chunk: int | None) -> None:
    if len(tokens) != len(labels):
        raise InvalidData(
            f"`hidden` has {counted(len(tokens), 'token')}, but `target` {counted(len(labels), 'label')}",
            hint="give a label for each token: `hidden` (..., width), `target` (...); "
            "`ignore_index` is for those not counted",
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidSetting(
            f"`label_smoothing` is {label_smoothing}", hint="give a share of the label's probability, 0 to 1"
        )
    if chunk is not None and chunk < 1:
        raise InvalidSetting(
            f"`chunk` is {chunk}", hint="give the number of tokens to process at a time, 1 or more; or leave it out"
        )


class LinearCrossEntropy(nn.Module):
    """Last layer and loss together; `weight` may be that of an embedding (`head.weight = embedding.weight`).

    `forward(hidden, target)` is (sum, count), as a task's `loss` returns it; `logits(hidden)` are those of `nn.Linear`.
    """

    def __init__(
        self,
        width: int,
        vocabulary: int,
        *,
        bias: bool = False,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        made = nn.Linear(width, vocabulary, bias=bias)
        self.weight, self.bias = made.weight, made.bias
        self.label_smoothing, self.ignore_index, self.chunk = label_smoothing, ignore_index, chunk

    def forward(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(
            hidden,
            self.weight,
            target,
            bias=self.bias,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            chunk=self.chunk,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (..., vocabulary)."""
        return F.linear(hidden, self.weight, self.bias)
