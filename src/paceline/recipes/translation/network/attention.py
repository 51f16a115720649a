"""Attention of several heads, with the names and numbers of `nn.MultiheadAttention`, on torch's fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.speed.layers.packed_attention import Packing, packed_attention


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    """Return torch's fused attention; on a CPU in fp32, whose backward takes a quarter of that in bf16 there.

    One query, as each step of a search has it, is two small products on a GPU: cuDNN, which torch would ask, plans anew
    for every number of keys, which takes tens of milliseconds.
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            wide = query.float(), key.float(), value.float()
            return F.scaled_dot_product_attention(*wide, mask, dropout, is_causal).to(query.dtype)
    if query.is_cuda and query.shape[2] == 1 and not dropout and not is_causal:
        scores = (query @ key.transpose(2, 3)).float() * query.shape[3] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        mixed: Tensor = scores.softmax(-1).to(value.dtype) @ value
        return mixed
    if query.is_cuda and not torch.is_grad_enabled():  # lengths of any number
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal)


class Attention(nn.Module):
    """Self-attention, or attention to a memory; batch first."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        assert width % heads == 0, "checked with the settings"
        self.width, self.heads, self.dropout = width, heads, dropout
        # As torch's own layers: with the dtype and on the device that the user has set.
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width, dtype=None, device=None))
        """Rows of queries, keys and values, one below the other."""
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width, dtype=None, device=None))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        packing: Packing | None = None,
        memory_packing: Packing | None = None,
    ) -> Tensor:
        """Return (batch, time, width); `mask` is True where a key may be looked at.

        With `packing` sequences lie one after the other: x, memory and the result are (tokens, width).
        """
        if packing is not None:
            return self._attend_packed(x, memory, is_causal, packing, memory_packing)
        if memory is None:
            query, key, value = self.project(x)
        else:
            query, (key, value) = self.queries(x), self.keys_values(memory)
        return self.attend(query, key, value, mask, is_causal)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of one sequence, each (batch, heads, time, width / heads)."""
        query, key, value = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        return self._split(query), self._split(key), self._split(value)

    def queries(self, x: Tensor) -> Tensor:
        return self._split(F.linear(x, self.in_proj_weight[: self.width], self.in_proj_bias[: self.width]))

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        key, value = F.linear(memory, self.in_proj_weight[self.width :], self.in_proj_bias[self.width :]).chunk(2, -1)
        return self._split(key), self._split(value)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        mixed = fused_attention(query, key, value, mask, self.dropout if self.training else 0.0, is_causal)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _attend_packed(
        self, x: Tensor, memory: Tensor | None, is_causal: bool, packing: Packing, memory_packing: Packing | None
    ) -> Tensor:
        rows = self.width if memory is not None else 3 * self.width  # queries alone, or all three
        parts = F.linear(x, self.in_proj_weight[:rows], self.in_proj_bias[:rows]).split(self.width, -1)
        if memory is not None:
            parts += F.linear(memory, self.in_proj_weight[rows:], self.in_proj_bias[rows:]).split(self.width, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in parts)  # (tokens, heads, width / heads)
        dropout = self.dropout if self.training else 0.0
        keys = None if memory is None else memory_packing
        mixed = packed_attention(query, key, value, packing, key_packing=keys, is_causal=is_causal, dropout=dropout)
        out: Tensor = self.out_proj(mixed.flatten(1))
        return out

    def _split(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return split
