"""The Transformer (Vaswani et al. 2017), before or after which norms stand; weights are named as in `nn.Transformer`.

Padding is at the end of a sequence. In the source it is masked; in the target nothing looks at what comes later, so
that it needs no mask of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.translation.network.attention import Attention
from paceline.recipes.translation.network.embedding import make_embedding
from paceline.recipes.translation.network.scores import Packings, ScoresTokens
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.text.vocabulary import PAD
from paceline.speed.layers.packed_attention import Packing

KNOWN_POSITIONS = 1024
"""Positions that are computed once; those of longer sequences are computed when they come."""


class FeedForward(nn.Module):
    """Base of a layer: two linear maps with a ReLU between them."""

    linear1: nn.Linear
    linear2: nn.Linear

    def _make_feed_forward(self, shape: Shape) -> None:
        self.linear1 = nn.Linear(shape.width, shape.ffn_width)
        self.linear2 = nn.Linear(shape.ffn_width, shape.width)
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.activation_dropout, self.dropout = shape.activation_dropout, shape.dropout
        self.is_pre_norm = shape.norm == "pre"

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(self.linear1(x)), self.activation_dropout, self.training)
        out: Tensor = self.linear2(hidden)
        return out

    def _add(self, x: Tensor, change: Tensor) -> Tensor:
        return x + F.dropout(change, self.dropout, self.training)


class EncoderLayer(FeedForward):
    """Self-attention and feed-forward, each with a residual and a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape.width, shape.heads, shape.attention_dropout)
        self._make_feed_forward(shape)
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, mask: Tensor | None, packing: Packing | None = None) -> Tensor:
        if self.is_pre_norm:
            x = self._add(x, self.self_attn(self.norm1(x), None, mask, packing=packing))
            return self._add(x, self._feed_forward(self.norm2(x)))
        x = self.norm1(self._add(x, self.self_attn(x, None, mask, packing=packing)))
        out: Tensor = self.norm2(self._add(x, self._feed_forward(x)))
        return out


class DecoderLayer(FeedForward):
    """Self-attention to what was written, attention to the source, and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape.width, shape.heads, shape.attention_dropout)
        self.multihead_attn = Attention(shape.width, shape.heads, shape.attention_dropout)
        self._make_feed_forward(shape)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(shape.width) for _ in range(3))

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        packing: Packing | None = None,
        memory_packing: Packing | None = None,
    ) -> Tensor:
        packings = {"packing": packing, "memory_packing": memory_packing}
        if self.is_pre_norm:
            x = self._add(x, self.self_attn(self.norm1(x), is_causal=True, packing=packing))
            x = self._add(x, self.multihead_attn(self.norm2(x), memory, mask, **packings))
            return self._add(x, self._feed_forward(self.norm3(x)))
        x = self.norm1(self._add(x, self.self_attn(x, is_causal=True, packing=packing)))
        x = self.norm2(self._add(x, self.multihead_attn(x, memory, mask, **packings)))
        out: Tensor = self.norm3(self._add(x, self._feed_forward(x)))
        return out

    def step(self, x: Tensor, seen: Seen, mask: Tensor | None) -> Tensor:
        """Return the layer's output for one more position, (rows, 1, width)."""
        if self.is_pre_norm:
            x = x + self._look_back(self.norm1(x), seen)
            x = x + self._look_at_source(self.norm2(x), seen, mask)
            return x + self._feed_forward(self.norm3(x))
        x = self.norm1(x + self._look_back(x, seen))
        x = self.norm2(x + self._look_at_source(x, seen, mask))
        out: Tensor = self.norm3(x + self._feed_forward(x))
        return out

    def _look_back(self, x: Tensor, seen: Seen) -> Tensor:
        query, key, value = self.self_attn.project(x)
        seen.append(key, value)
        assert seen.key is not None
        assert seen.value is not None
        return self.self_attn.attend(query, seen.key, seen.value)

    def _look_at_source(self, x: Tensor, seen: Seen, mask: Tensor | None) -> Tensor:
        attention = self.multihead_attn
        return attention.attend(attention.queries(x), seen.source_key, seen.source_value, mask)


@dataclass
class Seen:
    """Keys and values of one layer: of the source, and of what was written so far."""

    source_key: Tensor
    source_value: Tensor
    key: Tensor | None = None
    value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> None:
        self.key = key if self.key is None else torch.cat([self.key, key], 2)
        self.value = value if self.value is None else torch.cat([self.value, value], 2)


@dataclass
class TransformerState:
    """Position of sentences that are being written, one per row."""

    layers: list[Seen]
    mask: Tensor
    """(rows, 1, 1, source time), True for tokens."""
    position: int = 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be there several times."""
        self.mask = self.mask[rows]
        for seen in self.layers:
            seen.source_key, seen.source_value = seen.source_key[rows], seen.source_value[rows]
        self.reorder(rows)

    def reorder(self, rows: Tensor) -> None:
        """Put rows in another order that exchanges only rows of one source."""
        for seen in self.layers:
            seen.key = None if seen.key is None else seen.key[rows]
            seen.value = None if seen.value is None else seen.value[rows]


class Encoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.encoder_layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, packing)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.decoder_layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        packing: Packing | None = None,
        memory_packing: Packing | None = None,
    ) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, mask, packing, memory_packing)
        out: Tensor = self.norm(x)
        return out


class Transformer(ScoresTokens):
    """Tokens in, scores of the next token out."""

    positions: Tensor

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape, self.vocabulary = shape, vocabulary
        self.embedding = make_embedding(vocabulary, shape.width)
        """Of the source; with shared embeddings also of the target, and the rows of the last layer."""
        self.target_embedding = make_embedding(vocabulary, shape.width) if shape.share != "all" else None
        self.output = nn.Linear(shape.width, vocabulary, bias=False) if shape.share == "none" else None
        self.encoder, self.decoder = Encoder(shape), Decoder(shape)
        self.register_buffer("positions", sinusoids(KNOWN_POSITIONS, shape.width), persistent=False)

    def hidden(self, source: Tensor, target: Tensor, packings: Packings | None = None) -> Tensor:
        """Return (batch, target time, width), from which the last layer computes scores; (tokens, width) if packed."""
        target_embedding = self.target_embedding or self.embedding
        if packings is not None:
            of_source, of_target = packings.source, packings.target
            memory = self.encoder(self._embed_packed(self.embedding, source, of_source), None, of_source)
            x = self._embed_packed(target_embedding, target, of_target)
            packed: Tensor = self.decoder(x, memory, None, of_target, of_source)
            return packed
        mask = source_mask(source)
        memory = self.encoder(self._embed(self.embedding, source), mask)
        out: Tensor = self.decoder(self._embed(target_embedding, target), memory, mask)
        return out

    def begin(self, source: Tensor) -> TransformerState:
        """Read the source, before the first token is written."""
        mask = source_mask(source)
        memory = self.encoder(self._embed(self.embedding, source), mask)
        layers = []
        for layer in self.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            layers.append(Seen(*layer.multihead_attn.keys_values(memory)))
        return TransformerState(layers, mask)

    def step(self, tokens: Tensor, state: TransformerState) -> Tensor:
        """Return scores of the token that follows, (rows, vocabulary); `tokens` are the last ones, (rows)."""
        embedding = self.target_embedding or self.embedding
        x = self._embed(embedding, tokens.unsqueeze(1), state.position)
        for layer, seen in zip(self.decoder.layers, state.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, seen, state.mask)
        state.position += 1
        return self.head(self.decoder.norm(x)).squeeze(1)

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, first: int = 0) -> Tensor:
        end = first + tokens.shape[1]
        return self._place(embedding, tokens, self._positions(end, tokens)[first:end])

    def _embed_packed(self, embedding: nn.Embedding, tokens: Tensor, packing: Packing) -> Tensor:
        numbers = packing.places % max(1, packing.longest)
        return self._place(embedding, tokens, self._positions(packing.longest, tokens)[numbers])

    def _positions(self, number: int, tokens: Tensor) -> Tensor:
        return self.positions if number <= KNOWN_POSITIONS else sinusoids(number, self.shape.width, tokens.device)

    def _place(self, embedding: nn.Embedding, tokens: Tensor, positions: Tensor) -> Tensor:
        x = embedding(tokens) * math.sqrt(self.shape.width)
        return F.dropout(x + positions.to(x.dtype), self.shape.dropout, self.training)


def source_mask(source: Tensor) -> Tensor:
    """Return (batch, 1, 1, time), True for tokens."""
    return (source != PAD)[:, None, None, :]


def sinusoids(number: int, width: int, device: torch.device | Literal["cpu"] = "cpu") -> Tensor:
    """Return (number, width): sines, then cosines, of wavelengths from 2 pi to 10,000 times that."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device, dtype=torch.float64) * (-math.log(10_000) / max(1, half - 1)))
    angles = torch.arange(number, device=device, dtype=torch.float64).unsqueeze(1) * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, width % 2)).float()
