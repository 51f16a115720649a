"""Attention over sequences that lie one after the other without padding.

On a GPU with bf16 or fp16 through torch's varlen attention, where this torch has it; elsewhere, and with dropout, which
that has not, through torch's fused attention on rows that are padded for the time of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import PacelineError

MOST_HEAD_WIDTH = 256
"""Of varlen attention."""


class PackingMisfit(PacelineError):
    """A tensor that has other sequences than its packing says."""

    what: str
    tokens: int
    packed: int
    sentence = "{what} has {tokens:#token}, but its packing {packed}"
    hint = "pack it with `Packing.of(lengths)` of its own lengths"


class CausalAcross(PacelineError):
    """Causal attention from one packing to another."""

    sentence = "causal attention looks back in one sequence, but queries and keys have packings of their own"
    hint = "leave out `key_packing`, or `is_causal`"


@dataclass(frozen=True)
class Packing:
    """Places of sequences that lie one after the other: made on the host, where lengths are known, then moved."""

    lengths: tuple[int, ...]
    offsets: Tensor
    """(sequences + 1) int32: where each begins, and where the last ends."""
    places: Tensor
    """(tokens) int64: place of each token in rows that are padded to the longest, flat."""

    @classmethod
    def of(cls, lengths: Sequence[int] | Tensor) -> Packing:
        """Return the packing of sequences of these lengths, on the CPU."""
        numbers = tuple(int(length) for length in (lengths.tolist() if isinstance(lengths, Tensor) else lengths))
        each = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        ends = each.cumsum(0)
        offsets = F.pad(ends, (1, 0)).to(torch.int32)
        longest = max(numbers, default=0)
        rows = torch.repeat_interleave(torch.arange(len(numbers), device="cpu") * longest - (ends - each), each)
        places = rows + torch.arange(sum(numbers), device="cpu")
        return cls(numbers, offsets, places)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def num_tokens(self) -> int:
        return len(self.places)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Packing:
        moved = (each.to(device, non_blocking=non_blocking) for each in (self.offsets, self.places))
        return Packing(self.lengths, *moved)

    def pack(self, rows: Tensor) -> Tensor:
        """(sequences, time, ...) -> (tokens, ...): what is behind a length is left out."""
        time = rows.shape[1]
        places = self.places if time == self.longest else self._places_in(time)
        return rows.flatten(0, 1)[places]

    def unpack(self, tokens: Tensor) -> Tensor:
        """(tokens, ...) -> (sequences, longest, ...), with zeros behind each length."""
        self.check(tokens, "the tensor")
        rows = tokens.new_zeros(len(self.lengths) * self.longest, *tokens.shape[1:])
        padded: Tensor = rows.index_copy(0, self.places, tokens)
        return padded.view(len(self.lengths), self.longest, *tokens.shape[1:])

    def check(self, tokens: Tensor, what: str) -> None:
        if len(tokens) != self.num_tokens:
            raise PackingMisfit(what, len(tokens), self.num_tokens)

    def mask(self) -> Tensor:
        """Return (sequences, longest), True for tokens."""
        lengths = self.offsets.diff()
        return torch.arange(self.longest, device=lengths.device) < lengths.unsqueeze(1)

    def _places_in(self, time: int) -> Tensor:
        rows = torch.div(self.places, max(1, self.longest), rounding_mode="floor")
        return self.places + rows * (time - self.longest)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    key_packing: Packing | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Return (tokens, heads, head width): attention of each sequence to itself, or to one of another packing.

    All are (tokens, heads, head width). `key_packing` is that of keys and values, if not that of the queries; sequence
    n looks at sequence n.
    """
    if is_causal and key_packing is not None:
        raise CausalAcross
    keys = key_packing or packing
    for tensor, of, what in ((query, packing, "query"), (key, keys, "key"), (value, keys, "value")):
        of.check(tensor, f"`{what}`")
    if not dropout and _goes_packed(query):
        return _varlen(query, key, value, packing, keys, is_causal)
    # (sequences, heads, longest, head width)
    q, k, v = (of.unpack(tensor).transpose(1, 2) for tensor, of in ((query, packing), (key, keys), (value, keys)))
    seen = keys.mask()
    mask = (seen | ~seen.any(1, keepdim=True))[:, None, None, :]  # nothing to look at: zeros, not nan
    if is_causal:
        mask = mask & torch.ones(keys.longest, keys.longest, dtype=torch.bool, device=query.device).tril()
    mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    return packing.pack(mixed.transpose(1, 2))


def _goes_packed(query: Tensor) -> bool:
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or _function() is None:
        return False
    is_fitting = query.shape[-1] % 8 == 0 and query.shape[-1] <= MOST_HEAD_WIDTH
    return is_fitting and torch.cuda.get_device_capability(query.device) >= (8, 0)


@lru_cache(maxsize=1)
def _function() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """Return torch's varlen attention and the names of its arguments; None where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, keys: Packing, is_causal: bool) -> Tensor:
    found = _function()
    assert found is not None
    attend, names = found
    options: dict[str, Any] = {}
    if is_causal:  # torch 2.13 has a window instead
        options |= {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
    if "num_splits" in names:  # then a sequence's bits do not depend on those beside it
        options["num_splits"] = 1
    mixed: Tensor = attend(query, key, value, packing.offsets, keys.offsets, packing.longest, keys.longest, **options)
    return mixed
