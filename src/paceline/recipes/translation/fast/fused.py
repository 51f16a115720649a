"""Training a Transformer on sentences without padding, through our own kernels: same parameters, same state dict.

Tokens of all sentences lie one after the other, in bfloat16. Bias, dropout, residual and norm behind a part of a layer
are one kernel; keys and values that all layers of the decoder make of the source are one product; the scores of
all units are never in memory. Evaluation, rows with padding, and whatever is not bfloat16 autocast go the plain way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.torch_private import foreach_copy_
from paceline.recipes.translation.fast.operators import (
    Brought,
    EmbeddingNorm,
    FeedForwardNorm,
    Gradients,
    Joint,
    Linear,
    LinearNorm,
    Narrow,
    Place,
    SeveralLinear,
    TableGradient,
    Where,
    attention_to,
    self_attention,
)
from paceline.recipes.translation.network.attention import Attention
from paceline.recipes.translation.network.scores import Packings
from paceline.recipes.translation.network.transformer import (
    KNOWN_POSITIONS,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    Transformer,
    sinusoids,
)
from paceline.recipes.translation.text.vocabulary import PAD
from paceline.speed.layers.added_norm import MOST_WIDTH
from paceline.speed.layers.head_loss import linear_cross_entropy
from paceline.speed.layers.occurrences import Occurrences
from paceline.speed.layers.packed_attention import Packing

MOST_LOGITS = 2**29
"""Logits of a chunk: 1 GiB of them."""


def accelerate(model: Transformer) -> list[str]:
    """Train packed sentences through the kernels from now on; or leave the model as it is and return every reason."""
    reasons = obstacles(model)
    if not reasons:
        model.forward = MethodType(_forward, model)  # type: ignore[method-assign]
    return reasons


def obstacles(model: Transformer) -> list[str]:
    """Return what of this network the kernels cannot do."""
    shape, reasons = model.shape, []
    if shape.attention_dropout:
        reasons.append(f"attention dropout {shape.attention_dropout:g}: packed attention has none")
    if shape.activation_dropout:
        reasons.append(f"activation dropout {shape.activation_dropout:g}: the ReLU is part of a product")
    if shape.width > MOST_WIDTH:
        reasons.append(f"width {shape.width}, more than {MOST_WIDTH}")
    return reasons


def _forward(
    self: Transformer,
    source: Tensor,
    target: Tensor,
    truth: Tensor | None = None,
    smoothing: float = 0.0,
    packings: Packings | None = None,
) -> Tensor:
    device = source.device.type
    is_narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
    if truth is None or packings is None or not is_narrow or not self.training:
        return Transformer.forward(self, source, target, truth, smoothing, packings)
    return packed_loss(self, source, target, truth, smoothing, packings, torch.bfloat16)


def packed_loss(
    model: Transformer,
    source: Tensor,
    target: Tensor,
    truth: Tensor,
    smoothing: float,
    packings: Packings,
    dtype: torch.dtype,
) -> Tensor:
    """Return the summed loss of a training pass, in this dtype: bfloat16, or another one to check it on a CPU."""
    this = Pass.begin(model, packings, dtype)
    memory = this.encode(source)
    hidden = this.decode(target, memory)
    head = this.head()
    chunk = max(1, MOST_LOGITS // len(head))
    total, _ = linear_cross_entropy(hidden, head, truth, label_smoothing=smoothing, ignore_index=PAD, chunk=chunk)
    return total


Part = Callable[[Tensor, Tensor, nn.LayerNorm], tuple[Tensor, Tensor]]
"""(input, residual, norm) -> (norm of the sum, sum)."""


@dataclass
class Pass:
    """One forward pass: what its layers share."""

    model: Transformer
    packings: Packings
    dtype: torch.dtype
    narrow: dict[Tensor, Tensor]
    """Weights in the dtype of the activations, by parameter; of attention to the source only queries' rows."""
    to_source: Narrow
    """Rows of keys and values of all layers of the decoder, one below the other."""
    seeds: Iterator[Tensor | None]
    tables: dict[Tensor, TableGradient]
    """Gradients of embeddings, with that of the last layer if it has the same weights."""

    @classmethod
    def begin(cls, model: Transformer, packings: Packings, dtype: torch.dtype) -> Pass:
        narrow, to_source = _narrowed(model, dtype)
        rate, shape = model.shape.dropout if model.training else 0.0, model.shape
        num = 2 + 2 * shape.encoder_layers + 3 * shape.decoder_layers
        seeds: list[Tensor | None] = [None] * num
        if rate:
            device = model.head_weight.device
            seeds = list(torch.randint(-(2**31), 2**31 - 1, (num, 2), dtype=torch.int32, device=device).unbind())
        return cls(model, packings, dtype, narrow, to_source, iter(seeds), _tables(model))

    def head(self) -> Tensor:
        """Return the weight of the last layer."""
        weight = self.model.head_weight
        if weight not in self.tables:
            return weight
        brought: Tensor = Brought.apply(weight, self.tables[weight])  # type: ignore[no-untyped-call]
        return brought

    def encode(self, source: Tensor) -> Tensor:
        """(source tokens) -> (source tokens, width)"""
        packing, parts, norms = self.packings.source, list[Part](), list[nn.LayerNorm]()
        for layer in self.model.encoder.layers:
            assert isinstance(layer, EncoderLayer)
            parts += [self._looks_around(layer.self_attn, packing, is_causal=False), self._feeds_forward(layer)]
            norms += [layer.norm1, layer.norm2]
        place = self._place(self.model.embedding.weight, source, packing, self.packings.in_source)
        return self._through(self.model.embedding.weight, place, parts, [*norms, self.model.encoder.norm])

    def decode(self, target: Tensor, memory: Tensor) -> Tensor:
        """(target tokens) and (source tokens, width) -> (target tokens, width)"""
        model, packing = self.model, self.packings.target
        parts, norms = list[Part](), list[nn.LayerNorm]()
        layers = [layer for layer in model.decoder.layers if isinstance(layer, DecoderLayer)]
        width = model.shape.width
        weights = [layer.multihead_attn.in_proj_weight.split([width, 2 * width]) for layer in layers]
        biases = [layer.multihead_attn.in_proj_bias.split([width, 2 * width]) for layer in layers]
        gradients = Gradients()
        of_source = [rows for _, rows in weights], [rows for _, rows in biases]
        joined = SeveralLinear.apply(memory, self.to_source, gradients, *of_source[0], *of_source[1])  # type: ignore[no-untyped-call]
        for number, layer in enumerate(layers):
            asks = self._asks_source(
                layer.multihead_attn,
                weights[number][0],
                biases[number][0],
                joined[number],
                Where(gradients, number, len(layers)),
            )
            parts += [self._looks_around(layer.self_attn, packing, is_causal=True), asks, self._feeds_forward(layer)]
            norms += [layer.norm1, layer.norm2, layer.norm3]
        table = (model.target_embedding or model.embedding).weight
        place = self._place(table, target, packing, self.packings.in_target)
        return self._through(table, place, parts, [*norms, model.decoder.norm])

    def _place(self, table: Tensor, tokens: Tensor, packing: Packing, occurrences: Occurrences) -> Place:
        model, longest = self.model, packing.longest
        positions = model.positions
        if longest > KNOWN_POSITIONS:
            positions = sinusoids(longest, model.shape.width, tokens.device)
        return Place(
            tokens,
            packing,
            occurrences,
            positions,
            math.sqrt(model.shape.width),
            self.tables.get(table) or TableGradient(1),
        )

    def _through(self, table: Tensor, place: Place, parts: Sequence[Part], norms: Sequence[nn.LayerNorm]) -> Tensor:
        """Return the output of residual parts; the last norm stands behind all of them."""
        shape = self.model.shape
        if shape.norm == "pre":
            joint = self._joint(norms[0])
            normed: Tensor
            normed, x = EmbeddingNorm.apply(table, joint.weight, joint.bias, place, joint, self.dtype)  # type: ignore[no-untyped-call]
            for part, norm in zip(parts, norms[1:], strict=True):
                normed, x = part(normed, x, norm)
            return normed
        next(self.seeds)
        numbers = place.packing.places % max(1, place.packing.longest)
        x = F.embedding(place.tokens, table) * place.scale + place.positions[numbers]
        x = F.dropout(x.to(self.dtype), shape.dropout, self.model.training)
        for part, norm in zip(parts, norms, strict=False):
            x, _ = part(x, x, norm)
        last = norms[-1]
        return F.layer_norm(x.to(last.weight.dtype), x.shape[-1:], last.weight, last.bias, last.eps).to(self.dtype)

    def _joint(self, norm: nn.LayerNorm) -> Joint:
        seed = next(self.seeds)
        rate = 0.0 if seed is None else self.model.shape.dropout
        return Joint(norm.weight, norm.bias, norm.eps, rate, seed)

    def _ends(self, x: Tensor, linear: nn.Linear, residual: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        joint, narrow = self._joint(norm), self.narrow[linear.weight]
        ends: tuple[Tensor, Tensor] = LinearNorm.apply(  # type: ignore[no-untyped-call]
            x, linear.weight, linear.bias, narrow, residual, joint.weight, joint.bias, joint
        )
        return ends

    def _looks_around(self, attention: Attention, packing: Packing, *, is_causal: bool) -> Part:
        def part(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
            weight, bias = attention.in_proj_weight, attention.in_proj_bias
            joined = Linear.apply(x, weight, bias, Narrow(self.narrow[weight], self.narrow[bias]))  # type: ignore[no-untyped-call]
            mixed = self_attention(joined, packing, attention.heads, is_causal=is_causal)
            return self._ends(mixed, attention.out_proj, residual, norm)

        return part

    def _asks_source(self, attention: Attention, weight: Tensor, bias: Tensor, joined: Tensor, where: Where) -> Part:
        """`weight` and `bias` are the rows of queries, `joined` the keys and values."""

        def part(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
            narrow = Narrow(self.narrow[attention.in_proj_weight], self.narrow[attention.in_proj_bias])
            query = Linear.apply(x, weight, bias, narrow)  # type: ignore[no-untyped-call]
            packings = self.packings
            mixed = attention_to(query, joined, packings.target, packings.source, attention.heads, where)
            return self._ends(mixed, attention.out_proj, residual, norm)

        return part

    def _feeds_forward(self, layer: FeedForward) -> Part:
        def part(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
            first, second, joint = layer.linear1, layer.linear2, self._joint(norm)
            ends: tuple[Tensor, Tensor] = FeedForwardNorm.apply(  # type: ignore[no-untyped-call]
                x,
                first.weight,
                first.bias,
                second.weight,
                second.bias,
                Narrow(self.narrow[first.weight], self.narrow[first.bias]),
                self.narrow[second.weight],
                residual,
                joint.weight,
                joint.bias,
                joint,
            )
            return ends

        return part


def _tables(model: Transformer) -> dict[Tensor, TableGradient]:
    """Return where the gradients of embeddings are added up; nowhere if those are torch's own (post-norm)."""
    if model.shape.norm == "post":
        return {}
    tables = [model.embedding.weight, (model.target_embedding or model.embedding).weight]
    used = Counter([*tables, *([model.head_weight] if model.output is None else [])])
    return {table: TableGradient(times) for table, times in used.items()}


@torch.no_grad()
def _narrowed(model: Transformer, dtype: torch.dtype) -> tuple[dict[Tensor, Tensor], Narrow]:
    """Round all weights of a pass together, for forward and backward."""
    width, num = model.shape.width, model.shape.decoder_layers
    whole: list[Tensor] = []
    asking: list[Attention] = []
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        attentions = [layer.self_attn]
        whole += [layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias]
        if isinstance(layer, DecoderLayer):
            attentions.append(layer.multihead_attn)
            asking.append(layer.multihead_attn)
        whole += [attention.out_proj.weight for attention in attentions]
        whole += [layer.linear1.weight, layer.linear1.bias, layer.linear2.weight]
    narrow = {wide: torch.empty_like(wide, dtype=dtype) for wide in whole}
    of, to = [wide.detach() for wide in whole], list(narrow.values())
    device, rows_below = model.head_weight.device, num * 2 * width
    stacked = Narrow(
        torch.empty(rows_below, width, dtype=dtype, device=device), torch.empty(rows_below, dtype=dtype, device=device)
    )
    for number, attention in enumerate(asking):
        below = slice(number * 2 * width, (number + 1) * 2 * width)
        for wide, rows in ((attention.in_proj_weight, stacked.weight), (attention.in_proj_bias, stacked.bias)):
            narrow[wide] = torch.empty_like(wide[:width], dtype=dtype)
            of += [wide.detach()[:width], wide.detach()[width:]]
            to += [narrow[wide], rows[below]]
    foreach_copy_(to, of)
    return narrow, stacked
