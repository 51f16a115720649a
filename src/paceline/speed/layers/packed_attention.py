"""Attention over sequences that lie one after the other without padding.

On a GPU with bf16 or fp16 through torch's varlen attention, where this torch has it; elsewhere, and with dropout, which
that has not, through torch's fused attention on rows that are padded for the time of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import Conflict, InvalidData, PacelineError
from paceline.core.units import counted
from paceline.speed.layers.kernels import ways

MOST_HEAD_WIDTH = 256
"""Of varlen attention."""


class SequencesDiffer(PacelineError):
    """Another number of sequences than a packing has."""

    what: str
    sequences: int
    packed: int
    sentence = "{what} has {sequences:#sequence}, but the packing {packed}"
    hint = "give as many, in the same order; a sequence may be empty"


class Packing(NamedTuple):
    """Places of sequences that lie one after the other: made on the host, where lengths are known, then moved.

    It is tensors alone. What is needed of it on the host, how many sequences there are and how long they may be, are
    their shapes: a CUDA graph can be replayed with another packing of the same shapes.
    """

    offsets: Tensor
    """(sequences + 1) int32: where each begins, and where the last ends."""
    places: Tensor
    """(tokens) int64: place of each token in rows that are padded to the longest, flat."""
    steps: Tensor
    """(longest) int32: 0, 1, 2, ..."""

    @classmethod
    def of(cls, lengths: Sequence[int] | Tensor, longest: int | None = None) -> Packing:
        """Return the packing of sequences of these lengths, on the CPU; rows are padded to `longest`, if that is given.

        A length may be 0.
        """
        each = torch.as_tensor(lengths, dtype=torch.int64, device="cpu").numpy()
        offsets = np.zeros(len(each) + 1, np.int64)
        np.cumsum(each, out=offsets[1:])
        most = int(each.max(initial=0))
        if longest is not None and longest < most:
            raise InvalidData(
                f"a sequence has {counted(most, 'token')}, but `longest` is {longest}",
                hint="give `Packing.of` the length of the longest sequence, or more",
            )
        row = most if longest is None else longest
        places = np.repeat(np.arange(len(each)) * row - offsets[:-1], each)
        places += np.arange(len(places))
        steps = np.arange(row, dtype=np.int32)
        return cls(torch.from_numpy(offsets.astype(np.int32)), torch.from_numpy(places), torch.from_numpy(steps))

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def longest(self) -> int:
        """Tokens that a sequence has at most."""
        return len(self.steps)

    @property
    def num_tokens(self) -> int:
        return len(self.places)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Packing:
        return Packing(*(each.to(device, non_blocking=non_blocking) for each in self))

    def pack(self, rows: Tensor) -> Tensor:
        """(sequences, time, ...) -> (tokens, ...): what is behind a length is left out."""
        self._check_rows(rows)
        time = rows.shape[1]
        places = self.places if time == self.longest else self._places_in(time)
        return rows.flatten(0, 1)[places]

    def unpack(self, tokens: Tensor) -> Tensor:
        """(tokens, ...) -> (sequences, longest, ...), with zeros behind each length."""
        self.check(tokens, "the tensor")
        rows = tokens.new_zeros(self.num_sequences * self.longest, *tokens.shape[1:])
        padded: Tensor = rows.index_copy(0, self.places, tokens)
        return padded.view(self.num_sequences, self.longest, *tokens.shape[1:])

    def check(self, tokens: Tensor, what: str) -> None:
        if len(tokens) != self.num_tokens:
            raise InvalidData(
                f"{what} has {counted(len(tokens), 'token')}, but its packing {self.num_tokens}",
                hint="pack it with `Packing.of(lengths)` of its own lengths",
            )

    def _check_rows(self, rows: Tensor) -> None:
        """Raise where rows do not hold the sequences; lengths are read on a CPU alone, as a GPU would be waited for."""
        if len(rows) != self.num_sequences:
            raise SequencesDiffer("the tensor", len(rows), self.num_sequences)
        time = rows.shape[1]
        if time >= self.longest or not self.num_sequences or self.offsets.is_cuda or torch.compiler.is_compiling():
            return
        length = int(self.offsets.diff().max())
        if time < length:
            raise InvalidData(
                f"rows have room for {counted(time, 'token')}, but a sequence has {length}",
                hint="pad rows to the longest sequence, or make the packing of the lengths that they have",
            )

    def mask(self) -> Tensor:
        """Return (sequences, longest), True for tokens."""
        return self.steps < self.offsets.diff().unsqueeze(1)

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
        raise Conflict(
            "causal attention looks back in one sequence, but queries and keys have packings of their own",
            hint="leave out `key_packing`, or `is_causal`",
        )
    keys = key_packing or packing
    for tensor, of, what in ((query, packing, "query"), (key, keys, "key"), (value, keys, "value")):
        of.check(tensor, f"`{what}`")
    if keys.num_sequences != packing.num_sequences:
        raise SequencesDiffer("`key_packing`", keys.num_sequences, packing.num_sequences)
    if not dropout and has_kernel(query):
        return attend(query, key, value, packing, keys, is_causal)
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


def has_kernel(query: Tensor) -> bool:
    """Return True if our own kernels attend: they are made for sentences, of some dozen tokens each."""
    is_fitting = query.shape[-1] in (16, 32, 64, 128) and query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_fitting and ways.in_use().packed and not torch.compiler.is_compiling()


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, keys: Packing, is_causal: bool) -> Tensor:
    """Attention by our own kernels; of each token's numbers those of one tensor lie together."""
    longest = max(packing.longest, keys.longest)
    mixed: Tensor = _Attention.apply(query, key, value, packing.offsets, keys.offsets, longest, is_causal)  # type: ignore[no-untyped-call]
    return mixed


class _Attention(torch.autograd.Function):
    """Attention of packed sequences, and its gradients, which lie as queries, keys and values do."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        key_offsets: Tensor,
        longest: int,
        is_causal: bool,
    ) -> Tensor:
        from paceline.speed.layers.kernels import packed_rows

        query, key, value = (_laid(each) for each in (query, key, value))
        if key.stride(0) != value.stride(0):
            key, value = key.contiguous(), value.contiguous()
        scale = query.shape[-1] ** -0.5
        out, logs = packed_rows.forward(query, key, value, offsets, key_offsets, longest, is_causal, scale)
        ctx.save_for_backward(query, key, value, out, logs, offsets, key_offsets)
        ctx.longest, ctx.is_causal = longest, is_causal
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        from paceline.speed.layers.kernels import packed_rows

        query, key, value, out, logs, offsets, key_offsets = ctx.saved_tensors
        of_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        of_key, of_value = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
        scale = query.shape[-1] ** -0.5
        packed_rows.backward(
            g.contiguous(), query, key, value, out, logs, of_query, of_key, of_value, offsets, key_offsets, ctx.longest,
            ctx.is_causal, scale,
        )  # fmt: skip
        return of_query, of_key, of_value, None, None, None, None


def _laid(tensor: Tensor) -> Tensor:
    """The numbers of a token one after the other, as kernels read them."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


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
