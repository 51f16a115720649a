"""The Transformer on sentences without padding: the same weights, loss and gradients, by `paceline.layers`.

Tokens of all sentences lie one after the other, so that linear layers, norms and the last layer compute on tokens
alone. Norms are joined with the dropout and the residual before them, and the last layer with the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.translation.network.attention import Attention
from paceline.recipes.translation.network.transformer import (
    KNOWN_POSITIONS,
    DecoderLayer,
    EncoderLayer,
    Transformer,
    sinusoids,
)
from paceline.recipes.translation.text.vocabulary import PAD
from paceline.speed.layers.added_norm import dropout_add_norm
from paceline.speed.layers.head_loss import linear_cross_entropy
from paceline.speed.layers.packed_attention import Packing, packed_attention


@dataclass(frozen=True)
class PackedPairs:
    """Sentence pairs, one after the other."""

    source: Tensor
    """(source tokens)"""
    target: Tensor
    """(target tokens), each sentence with its begin mark"""
    truth: Tensor
    """(target tokens): what follows each of them"""
    source_packing: Packing
    target_packing: Packing

    @classmethod
    def of(cls, source: Tensor, target: Tensor, truth: Tensor) -> PackedPairs:
        """Pack a padded batch; on the host, where lengths are known without waiting for a device."""
        lengths, others = ((each != PAD).sum(1) for each in (source, truth))
        packing, target_packing = Packing.of(lengths), Packing.of(others)
        return cls(
            packing.pack(source), target_packing.pack(target), target_packing.pack(truth), packing, target_packing
        )

    def to(self, device: torch.device | str) -> PackedPairs:
        source, target, truth = (each.to(device) for each in (self.source, self.target, self.truth))
        return PackedPairs(source, target, truth, self.source_packing.to(device), self.target_packing.to(device))

    @property
    def num_tokens(self) -> int:
        return len(self.source) + len(self.target)


def packed_loss(model: Transformer, pairs: PackedPairs, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with smoothed labels, summed over target tokens, and their number."""
    memory = _encoded(model, pairs)
    target = _embedded(model, model.target_embedding or model.embedding, pairs.target, pairs.target_packing)
    hidden = _decoded(model, target, memory, pairs)
    return linear_cross_entropy(
        hidden, model.head_weight, pairs.truth, label_smoothing=label_smoothing, ignore_index=PAD
    )


def _embedded(model: Transformer, embedding: nn.Embedding, tokens: Tensor, packing: Packing) -> Tensor:
    longest = packing.longest
    table = model.positions if longest <= KNOWN_POSITIONS else sinusoids(longest, model.shape.width, tokens.device)
    x = embedding(tokens) * math.sqrt(model.shape.width)
    places = table[packing.places % max(1, longest)]
    return F.dropout(x + places.to(x.dtype), model.shape.dropout, model.training)


Part = Callable[[Tensor], Tensor]


def _encoded(model: Transformer, pairs: PackedPairs) -> Tensor:
    packing, parts, norms = pairs.source_packing, list[Part](), list[nn.LayerNorm]()
    for layer in model.encoder.layers:
        assert isinstance(layer, EncoderLayer)
        parts += [_self_attention(layer.self_attn, packing, is_causal=False), layer._feed_forward]
        norms += [layer.norm1, layer.norm2]
    x = _embedded(model, model.embedding, pairs.source, packing)
    return _through(model, x, parts, [*norms, model.encoder.norm])


def _decoded(model: Transformer, x: Tensor, memory: Tensor, pairs: PackedPairs) -> Tensor:
    parts, norms = list[Part](), list[nn.LayerNorm]()
    for layer in model.decoder.layers:
        assert isinstance(layer, DecoderLayer)
        parts += [
            _self_attention(layer.self_attn, pairs.target_packing, is_causal=True),
            _attention_to(layer.multihead_attn, memory, pairs),
            layer._feed_forward,
        ]
        norms += [layer.norm1, layer.norm2, layer.norm3]
    return _through(model, x, parts, [*norms, model.decoder.norm])


def _through(model: Transformer, x: Tensor, parts: Sequence[Part], norms: Sequence[nn.LayerNorm]) -> Tensor:
    """Return the output of residual parts; the last norm stands behind all of them."""
    rate, training = model.shape.dropout, model.training

    def add(change: Tensor, x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        return dropout_add_norm(change, x, norm.weight, norm.bias, dropout=rate, training=training, eps=norm.eps)

    if model.shape.norm == "post":
        for part, norm in zip(parts, norms, strict=False):
            x, _ = add(part(x), x, norm)
        out: Tensor = norms[-1](x)
        return out
    normed: Tensor = norms[0](x)
    for part, norm in zip(parts, norms[1:], strict=True):
        normed, x = add(part(normed), x, norm)
    return normed


def _self_attention(attention: Attention, packing: Packing, *, is_causal: bool) -> Part:
    def attend(x: Tensor) -> Tensor:
        joined = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        query, key, value = joined.unflatten(-1, (3, attention.heads, -1)).unbind(-3)
        rate = attention.dropout if attention.training else 0.0
        mixed = packed_attention(query, key, value, packing, is_causal=is_causal, dropout=rate)
        out: Tensor = attention.out_proj(mixed.flatten(1))
        return out

    return attend


def _attention_to(attention: Attention, memory: Tensor, pairs: PackedPairs) -> Part:
    def attend(x: Tensor) -> Tensor:
        width = attention.width
        query = F.linear(x, attention.in_proj_weight[:width], attention.in_proj_bias[:width])
        joined = F.linear(memory, attention.in_proj_weight[width:], attention.in_proj_bias[width:])
        key, value = joined.unflatten(-1, (2, attention.heads, -1)).unbind(-3)
        mixed = packed_attention(
            query.unflatten(-1, (attention.heads, -1)),
            key,
            value,
            pairs.target_packing,
            key_packing=pairs.source_packing,
            dropout=attention.dropout if attention.training else 0.0,
        )
        out: Tensor = attention.out_proj(mixed.flatten(1))
        return out

    return attend
