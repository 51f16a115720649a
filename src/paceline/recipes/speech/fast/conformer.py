"""Training a Conformer through our own kernels: same parameters, same state dict, other way.

Activations travel as (batch, time, channel) in bfloat16. A layer is one node of autograd's graph, whose backward pass
is written out below: each of its products is the library's, what is between two products is one kernel or few
(`kernels.conformer`: `relative_attention`, `gated_conv`, `residual_norm`), and all sums over rows (biases, norms) of a
layer are added up at once. The norm at a layer's end and the one at the next one's begin are one pass; all positions
are multiplied at once, for all layers; weights are rounded once in a pass. What stands behind an utterance's length is
finite, is read by nobody, and has no gradient.

Evaluation, and whatever is not training in bfloat16 autocast, goes the plain way; so do grains past 2^31 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.terminal import warn
from paceline.core.torch_private import foreach_copy_
from paceline.core.units import counted
from paceline.recipes.speech.fast.running import Seen, track
from paceline.recipes.speech.kernels.conformer import gated_conv, residual_norm, subsampling
from paceline.recipes.speech.kernels.conformer.relative_attention import attend, attend_backward, places_backward
from paceline.recipes.speech.network.conformer.attention import dropped, sinusoids
from paceline.recipes.speech.network.conformer.convolution import SpeechBatchNorm
from paceline.recipes.speech.network.conformer.encoder import ConformerEncoder, ConformerLayer
from paceline.recipes.speech.network.conformer.settings import UNLIMITED, ConformerSettings
from paceline.speed.layers.kernels import ways

Norm = tuple[Tensor, Tensor]
DROPOUTS = 7
"""Of a layer: the middle of both feed-forward modules, attention, and what the four modules add."""
HALF = 0.5
"""Of what a feed-forward module adds."""
MOST_HEAD = 256
MOST_ELEMENTS = 2**31
_is_plain_said = False


def accelerate(encoder: ConformerEncoder) -> list[str]:
    """Train through the kernels from now on; or leave the encoder as it is and return every reason why."""
    reasons = obstacles(encoder)
    if not reasons:
        encoder.forward = MethodType(_forward, encoder)  # type: ignore[method-assign]
    return reasons


def obstacles(encoder: ConformerEncoder) -> list[str]:
    """Return what of this network the kernels cannot do."""
    reasons = list(_setting_obstacles(encoder.conformer))
    for name, module in encoder.named_modules():
        if isinstance(module, nn.BatchNorm1d) and type(module) is not SpeechBatchNorm:
            reasons.append(f"{name} is a {type(module).__name__}")
    return reasons


def _setting_obstacles(settings: ConformerSettings) -> Iterator[str]:
    if settings.self_attention_model != "rel_pos":
        yield f"self_attention_model {settings.self_attention_model}: the kernels know rel_pos"
    if settings.att_context_size != (UNLIMITED,):
        yield "attention that does not see the whole utterance"
    if settings.conv_norm_type != "batch_norm":
        yield f"conv_norm_type {settings.conv_norm_type}"
    if settings.conv_context[0] != settings.conv_context[1]:
        yield "convolutions that do not see as much before as after a frame"
    if not settings.use_bias:
        yield "no biases"
    if settings.stochastic_depth_drop_prob > 0:
        yield "layers that are left out"
    if settings.d_model // settings.n_heads > MOST_HEAD:
        yield f"heads of {settings.d_model // settings.n_heads} channels, more than {MOST_HEAD}"


def takes_frames(encoder: ConformerEncoder) -> bool:
    """Return True if the kernels know the convolutions before the layers; else they go the plain way."""
    settings = encoder.conformer
    if settings.subsampling != "dw_striding" or settings.subsampling_factor != 8 or settings.causal_downsampling:
        return False
    return settings.conv_channels % 128 == 0


def _forward(
    self: ConformerEncoder, features: Tensor, lengths: Tensor, capture: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    if not self.trains_in_bfloat16(features.device) or not _fits(self.conformer, features.shape):
        return ConformerEncoder.forward(self, features, lengths, capture)
    return encode(self, features.to(torch.bfloat16), lengths, capture)


def encode(
    encoder: ConformerEncoder, features: Tensor, lengths: Tensor, capture: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """The encoder's training pass, in the dtype of its features: bfloat16, or float64 to check it on a CPU."""
    settings = encoder.conformer
    layers = [layer for layer in encoder.layers if isinstance(layer, ConformerLayer)]
    has_kernels = takes_frames(encoder)
    matrices = _matrices(encoder, layers, features.dtype, has_kernels)
    seeds = _seeds(settings, features.device)
    first = _norm(layers[0].norm_feed_forward1)
    scale = math.sqrt(settings.d_model) if settings.xscaling else 1.0
    before = _Dropped(seeds.get(0, 0), settings.dropout_pre_encoder)
    if has_kernels:
        parameters = [*encoder.pre_encode.parameters(), *first]
        start = _Start(features, lengths.to(torch.int32), matrices["begin"], before, scale)
        x, normed = _Begin.apply(start, *parameters)  # type: ignore[no-untyped-call]
        after = subsampling.halved(subsampling.halved(subsampling.halved(lengths)))
    else:
        plain, after = _plain_begin(encoder, features, lengths)
        x, normed = _Enter.apply(plain.to(features.dtype), before, scale, *first)  # type: ignore[no-untyped-call]
    short = after.to(torch.int32)
    time = x.shape[1]
    numbers = torch.arange(time - 1, -time, -1, dtype=torch.float32, device=x.device)
    positions = dropped(sinusoids(numbers, settings.d_model), settings.dropout_emb).to(x.dtype)
    # (2 time - 1, layers * width)
    places = positions @ matrices["places"][0].t()
    seen: Seen = []
    captured = []
    for number, layer in enumerate(layers):
        following = layers[number + 1].norm_feed_forward1 if number + 1 < len(layers) else None
        width = settings.d_model
        drops = [_Dropped(seeds.get(number + 1, kind), share) for kind, share in enumerate(_shares(settings))]
        here = _Layer(
            short,
            places[:, number * width : (number + 1) * width],
            positions,
            settings.n_heads,
            matrices[str(number)],
            drops,
            layer.conv.batch_norm.eps,
            following is not None,
        )
        parameters = [*_parameters(layer), *(_norm(following) if following is not None else ())]
        x, normed, moments = _Through.apply(here, x, normed, *parameters)  # type: ignore[no-untyped-call]
        assert isinstance(layer.conv.batch_norm, SpeechBatchNorm)
        seen.append((layer.conv.batch_norm, moments))
        if number in capture:
            captured.append(x)
    track(seen)
    outputs = torch.cat([x, *captured]) if captured else x
    return outputs.transpose(1, 2), after


def _fits(settings: ConformerSettings, shape: torch.Size) -> bool:
    """The kernels count elements in 32 bits: a grain past that goes the plain way, which is said once. It is decided by
    shape alone, so that a CUDA graph holds one way or the other."""
    batch, mels, frames = shape
    time = settings.output_length(frames)
    widest = max(
        batch * frames * mels,
        batch * time * max(4, settings.ff_expansion_factor) * settings.d_model,
        batch * settings.n_heads * time * (time + 64),
    )
    if widest < MOST_ELEMENTS:
        return True
    _say_plain(batch, frames)
    return False


def _say_plain(batch: int, frames: int) -> None:
    global _is_plain_said
    if not _is_plain_said:
        _is_plain_said = True
        text = (
            f"a grain of {counted(batch, 'utterance')} of {frames} frames is past the 2^31 elements "
            "of the kernels: such grains are computed the plain way, which is slower; more "
            "`--grains` make them smaller"
        )
        warn(f"{text}\n")


def _plain_begin(encoder: ConformerEncoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    from paceline.recipes.speech.network.frames import frames_of

    x, frames = encoder.pre_encode(features, frames_of(lengths, features.shape[-1]))
    return x, frames.lengths


@dataclass(frozen=True)
class _Dropped:
    """A dropout: (2,) int32 that it follows from, None without, and the share that it drops."""

    seed: Tensor | None
    share: float


@dataclass
class _Seeds:
    """Drawn at once for all dropouts of a pass."""

    drawn: Tensor | None = None
    places: dict[tuple[int, int], int] = field(default_factory=dict)

    def get(self, layer: int, kind: int) -> Tensor | None:
        place = self.places.get((layer, kind))
        return None if place is None or self.drawn is None else self.drawn[place]


def _shares(settings: ConformerSettings) -> tuple[float, ...]:
    """Return the shares that the dropouts of a layer drop, in the order that they are used in."""
    usual = settings.dropout
    return usual, usual, settings.dropout_att, usual, usual, usual, usual


def _seeds(settings: ConformerSettings, device: torch.device) -> _Seeds:
    """Layer 0 is what enters the first one. Nothing is drawn for a network without dropout."""
    wanted = [(0, 0)] if settings.dropout_pre_encoder > 0 else []
    kinds = [kind for kind, share in enumerate(_shares(settings)) if share > 0]
    wanted += [(layer + 1, kind) for layer in range(settings.n_layers) for kind in kinds]
    if not wanted:
        return _Seeds()
    drawn = torch.randint(-(2**31), 2**31 - 1, (len(wanted), 2), dtype=torch.int32, device=device)
    return _Seeds(drawn, {each: place for place, each in enumerate(wanted)})


def _norm(module: nn.Module) -> Norm:
    assert isinstance(module, nn.LayerNorm)
    return module.weight, module.bias


def _parameters(layer: ConformerLayer) -> list[Tensor]:
    """In the order in which `_Through` returns their gradients."""
    attention, conv = layer.self_attn, layer.conv
    found: list[Tensor] = []
    for module in (
        layer.feed_forward1.linear1, layer.feed_forward1.linear2, layer.norm_self_att,
        attention.linear_q, attention.linear_k, attention.linear_v, attention.linear_out, layer.norm_conv,
        conv.pointwise_conv1, conv.depthwise_conv, conv.batch_norm, conv.pointwise_conv2, layer.norm_feed_forward2,
        layer.feed_forward2.linear1, layer.feed_forward2.linear2, layer.norm_out,
    ):  # fmt: skip
        assert isinstance(module.bias, Tensor)
        assert isinstance(module.weight, Tensor)
        found += [module.weight, module.bias]
    return [*found, attention.linear_pos.weight, attention.pos_bias_u, attention.pos_bias_v]


@torch.no_grad()
def _matrices(
    encoder: ConformerEncoder, layers: Sequence[ConformerLayer], dtype: torch.dtype, has_kernels: bool
) -> dict[str, list[Tensor]]:
    """Round all weights and biases of products of a pass in one kernel, for forward and backward.

    Of a layer: weight and bias of ff1, ff1, queries with keys and values, out, both of the convolution, ff2, ff2.
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    device = layers[0].norm_out.weight.device

    def rounded(*parts: Tensor) -> Tensor:
        """One under the other, as matrices."""
        flat = [part.detach().flatten(1) if part.dim() > 1 else part.detach() for part in parts]
        rows = sum(len(part) for part in flat)
        whole = torch.empty((rows, *flat[0].shape[1:]), dtype=dtype, device=device)
        sources.extend(flat)
        targets.extend(whole.split([len(part) for part in flat]))
        return whole

    found: dict[str, list[Tensor]] = {}
    for number, layer in enumerate(layers):
        attention, conv = layer.self_attn, layer.conv
        groups: list[list[Any]] = [
            [layer.feed_forward1.linear1], [layer.feed_forward1.linear2],
            [attention.linear_q, attention.linear_k, attention.linear_v], [attention.linear_out],
            [conv.pointwise_conv1], [conv.pointwise_conv2],
            [layer.feed_forward2.linear1], [layer.feed_forward2.linear2],
        ]  # fmt: skip
        found[str(number)] = [
            rounded(*(getattr(module, name) for module in group)) for group in groups for name in ("weight", "bias")
        ]
    found["places"] = [rounded(*(layer.self_attn.linear_pos.weight for layer in layers))]
    if has_kernels:
        strides: list[Any] = list(encoder.pre_encode.conv)
        out = encoder.pre_encode.out
        channels = strides[0].weight.shape[0]
        taps = torch.zeros(16, channels, dtype=dtype, device=device)
        taps[:9] = strides[0].weight.detach().view(channels, 9).t()
        taps[9] = strides[0].bias.detach()
        # The output's channels come last here, its mels in the plain module.
        turned = out.weight.detach().unflatten(1, (channels, -1)).transpose(1, 2).flatten(1).to(dtype)
        pointwise = [rounded(each) for place in (3, 6) for each in (strides[place].weight, strides[place].bias)]
        found["begin"] = [taps, *pointwise, turned, rounded(out.bias)]
    foreach_copy_(targets, sources)
    return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(..., channels) -> (..., filters)."""
    return torch.addmm(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)


def _across(g: Tensor, weight: Tensor) -> Tensor:
    """Gradient of what was multiplied with a weight."""
    return torch.mm(g.flatten(0, -2), weight).view(*g.shape[:-1], -1)


def _of_weight(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of a weight, (filters, channels), in float32 at least."""
    left, right = g.flatten(0, -2).t(), x.flatten(0, -2)
    if g.is_cuda:
        wide: Tensor = torch.mm(left, right, out_dtype=torch.float32)
        return wide
    return left @ right


class _Aside:
    """Work that nobody waits for before a layer's backward is done, such as weight gradients: on a stream of its own,
    so that it fills what the kernels between the products leave idle."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _side_stream(device) if device.type == "cuda" and ways.in_use().aside else None
        self._read: list[Tensor] = []
        """Must not be freed, and written anew by the other stream, before they are read."""

    def run(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return function(*tensors); of what it returns nothing may be read before `join`."""
        if self._stream is None:
            return function(*tensors)
        self._read += tensors
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            return function(*tensors)

    def join(self) -> None:
        """Let the current stream wait for all of it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _taps(weight: Tensor) -> Tensor:
    """(channels, 1, ...) -> (taps, channels)."""
    return weight.detach().flatten(1).t().contiguous()


@dataclass(frozen=True)
class _Start:
    """Inputs of `_Begin` without a gradient."""

    features: Tensor
    lengths: Tensor
    matrices: list[Tensor]
    before: _Dropped
    scale: float


class _Begin(torch.autograd.Function):
    """Convolutions of stride 2, the product behind them, dropout, and the first layer's first norm."""

    @staticmethod
    def forward(ctx: Any, start: _Start, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        _, _, depth_1, depth_bias_1, _, _, depth_2, depth_bias_2, *_, weight, bias = parameters
        taps, middle, middle_bias, last, last_bias, out, out_bias = start.matrices
        features = start.features.contiguous()
        a = subsampling.first(features, start.lengths, taps, _taps(depth_1), depth_bias_1.detach())
        b = _linear(a, middle, middle_bias)
        c = subsampling.second(b, start.lengths, _taps(depth_2), depth_bias_2.detach())
        d = _linear(c, last, last_bias).relu_()
        e = _linear(d.flatten(2), out, out_bias)
        norms = [(weight.detach(), bias.detach())]
        total, moments, normed = residual_norm.forward(
            e, None, norms, start.before.seed, start.before.share, start.scale, LAYER_NORM_EPS
        )
        ctx.start, ctx.norms = start, norms
        ctx.shapes = [parameter.shape for parameter in parameters]
        ctx.save_for_backward(features, a, b, c, d, total, moments, depth_1, depth_2)
        return total, normed

    @staticmethod
    def backward(ctx: Any, g_total: Tensor, g_normed: Tensor) -> Any:
        features, a, b, c, d, total, moments, depth_1, depth_2 = ctx.saved_tensors
        start: _Start = ctx.start
        taps, middle, _, last, _, out, _ = start.matrices
        width, channels = total.shape[-1], a.shape[-1]
        parts = _parts(total, 3 * width)
        of_e, _ = residual_norm.backward(
            g_normed.contiguous(), g_total.contiguous(), total, moments, ctx.norms, start.before.seed,
            start.before.share, start.scale, False, parts,
        )  # fmt: skip
        of_norm, of_norm_bias, of_out_bias = parts.sum(0).view(3, width)
        of_out = _of_weight(of_e, d.flatten(2)).unflatten(1, (-1, channels)).transpose(1, 2).flatten(1)
        of_d = torch.ops.aten.threshold_backward(_across(of_e, out).view_as(d), d, 0)
        parts = _parts(total, channels)
        residual_norm.column_sums(of_d, parts)
        of_last, of_last_bias = _of_weight(of_d, c), parts.sum(0)
        of_b, sums = subsampling.second_backward(_across(of_d, last), b, start.lengths, _taps(depth_2))
        of_middle = _of_weight(of_b, a)
        first = subsampling.first_backward(_across(of_b, middle), features, start.lengths, taps, _taps(depth_1))
        found = [
            first[:9].t(), first[9], first[16:25].t(), first[25], of_middle, sums[10], sums[:9].t(), sums[9],
            of_last, of_last_bias, of_out, of_out_bias, of_norm, of_norm_bias,
        ]  # fmt: skip
        return None, *(each.reshape(shape) for each, shape in zip(found, ctx.shapes, strict=True))


class _Enter(torch.autograd.Function):
    """Dropout and the first layer's first norm, behind convolutions that went the plain way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: _Dropped, scale: float, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        norms = [(weight.detach(), bias.detach())]
        total, moments, normed = residual_norm.forward(
            x.contiguous(), None, norms, before.seed, before.share, scale, LAYER_NORM_EPS
        )
        ctx.before, ctx.scale, ctx.norms = before, scale, norms
        ctx.save_for_backward(total, moments)
        return total, normed

    @staticmethod
    def backward(ctx: Any, g_total: Tensor, g_normed: Tensor) -> Any:
        total, moments = ctx.saved_tensors
        width = total.shape[-1]
        parts = _parts(total, 3 * width)
        of_x, _ = residual_norm.backward(
            g_normed.contiguous(), g_total.contiguous(), total, moments, ctx.norms, ctx.before.seed,
            ctx.before.share, ctx.scale, False, parts,
        )  # fmt: skip
        of_weight, of_bias, _ = parts.sum(0).view(3, width)
        return of_x, None, None, of_weight, of_bias


LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class _Layer:
    """Inputs of `_Through` without a gradient."""

    lengths: Tensor
    places: Tensor
    positions: Tensor
    heads: int
    matrices: list[Tensor]
    drops: list[_Dropped]
    eps: float
    has_following: bool


class _Through(torch.autograd.Function):
    """A layer: (x, norm of x) -> (x of the next, norm of that by the next one's norm), and moments of batch norm.

    Behind the last layer there is no such norm; instead of it comes something that nobody reads.
    """

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, normed: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        w = layer.matrices
        drops = layer.drops
        attention_norm, conv_norm, ff_norm = (
            [(parameters[place].detach(), parameters[place + 1].detach())] for place in (4, 14, 24)
        )
        out_norms = [(parameters[30].detach(), parameters[31].detach())]
        if layer.has_following:
            out_norms.append((parameters[35].detach(), parameters[36].detach()))
        depth, depth_bias = _taps(parameters[18]), parameters[19].detach()
        batch_norm = parameters[20].detach(), parameters[21].detach()
        u, v = parameters[33].detach().flatten(), parameters[34].detach().flatten()

        def added(y: Tensor, residual: Tensor, norms: list[Norm], drop: _Dropped, scale: float) -> tuple[Tensor, ...]:
            return residual_norm.forward(y, residual, norms, drop.seed, drop.share, scale, LAYER_NORM_EPS)

        h_1 = _linear(normed, w[0], w[1])
        a_1 = residual_norm.swish(h_1, drops[0].seed, drops[0].share)
        t_1, m_1, n_1 = added(_linear(a_1, w[2], w[3]), x, attention_norm, drops[1], HALF)
        qkv = _linear(n_1, w[4], w[5])
        o, *scores = attend(qkv, layer.places, u, v, layer.lengths, drops[2].seed, drops[2].share, layer.heads)
        t_2, m_2, n_2 = added(_linear(o, w[6], w[7]), t_1, conv_norm, drops[3], 1.0)
        y = _linear(n_2, w[8], w[9])
        gated = gated_conv.gate(y, layer.lengths)
        z, affine, moments = gated_conv.depthwise(
            gated, layer.lengths, depth, depth_bias, batch_norm, layer.eps, counts_all=False
        )
        s = gated_conv.swished(z, affine)
        t_3, m_3, n_3 = added(_linear(s, w[10], w[11]), t_2, ff_norm, drops[4], 1.0)
        h_2 = _linear(n_3, w[12], w[13])
        a_2 = residual_norm.swish(h_2, drops[5].seed, drops[5].share)
        t_4, m_4, *outs = added(_linear(a_2, w[14], w[15]), t_3, out_norms, drops[6], HALF)
        ctx.layer, ctx.norms = layer, (attention_norm, conv_norm, ff_norm, out_norms)
        ctx.shapes = [parameter.shape for parameter in parameters]
        ctx.save_for_backward(
            *(normed, h_1, a_1, t_1, m_1, n_1, qkv, o, *scores, t_2, m_2, n_2, y, gated, z, affine, moments, s),
            *(t_3, m_3, n_3, h_2, a_2, t_4, m_4, depth, u, v),
        )
        following = outs[1] if layer.has_following else outs[0].new_empty(0)
        ctx.mark_non_differentiable(moments)
        if not layer.has_following:
            ctx.mark_non_differentiable(following)
        ctx.set_materialize_grads(False)
        return outs[0], following, moments

    @staticmethod
    def backward(ctx: Any, g_x: Tensor | None, g_normed: Tensor | None, _: None) -> Any:
        layer: _Layer = ctx.layer
        (normed, h_1, a_1, t_1, m_1, n_1, qkv, o, *scores, t_2, m_2, n_2, y, gated, z, affine, moments, s) = (
            ctx.saved_tensors[:-10]
        )
        t_3, m_3, n_3, h_2, a_2, t_4, m_4, depth, u, v = ctx.saved_tensors[-10:]
        attention_norm, conv_norm, ff_norm, out_norms = ctx.norms
        w, drops = layer.matrices, layer.drops
        width, wide, kernel = t_1.shape[-1], h_1.shape[-1], len(depth)
        sizes = [(2 * len(out_norms) + 1) * width, wide, 3 * width, (kernel + 3) * width, 3 * width, 3 * width]
        parts = _parts(t_1, sum(sizes) + 3 * width + wide)
        ends, swish_2, ends_3, conv, ends_2, of_qkv_bias, ends_1, swish_1 = parts.split([*sizes, 3 * width, wide], 1)

        def under(
            g: Tensor, more: Tensor | None, total: Tensor, m: Tensor, norms: list[Norm], drop: _Dropped, scale: float,
            parts: Tensor,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            of_y, of_residual = residual_norm.backward(
                g, more, total, m, norms, drop.seed, drop.share, scale, True, parts
            )
            assert of_residual is not None
            return of_y, of_residual

        aside = _Aside(t_1.device)
        top, more = (g_normed, g_x) if layer.has_following else (g_x, None)
        if top is None:
            top = torch.zeros_like(t_4)
        of_f, of_t = under(
            top.contiguous(), None if more is None else more.contiguous(), t_4, m_4, out_norms, drops[6], HALF, ends
        )
        of_ff2_narrow = aside.run(_of_weight, of_f, a_2)
        of_h = residual_norm.swish_backward(_across(of_f, w[14]), h_2, drops[5].seed, drops[5].share, swish_2)
        of_ff2_wide = aside.run(_of_weight, of_h, n_3)
        of_c, of_t = under(_across(of_h, w[12]), of_t, t_3, m_3, ff_norm, drops[4], 1.0, ends_3)
        of_pointwise_2 = aside.run(_of_weight, of_c, s)
        of_z, norm_sums = gated_conv.norm_backward(
            _across(of_c, w[10]), z, affine, moments, layer.lengths, counts_all=False
        )
        of_taps, of_gate = conv.split([kernel * width, 3 * width], 1)
        aside.run(lambda g, u: gated_conv.taps_backward(g, u, layer.lengths, kernel, of_taps), of_z, gated)
        of_y = gated_conv.depthwise_backward(of_z, y, layer.lengths, depth, of_gate)
        of_pointwise_1 = aside.run(_of_weight, of_y, n_2)
        of_a, of_t = under(_across(of_y, w[8]), of_t, t_2, m_2, conv_norm, drops[3], 1.0, ends_2)
        of_out = aside.run(_of_weight, of_a, o)
        of_qkv, of_biases, slopes = attend_backward(
            _across(of_a, w[6]), qkv, layer.places, u, v, layer.lengths, drops[2].seed, drops[2].share, layer.heads,
            o, *scores,
        )  # fmt: skip
        aside.run(residual_norm.column_sums, of_qkv, of_qkv_bias)
        of_projections = aside.run(_of_weight, of_qkv, n_1)
        of_positions = aside.run(partial(_of_positions, layer), slopes, qkv, v)
        of_f, of_t = under(_across(of_qkv, w[4]), of_t, t_1, m_1, attention_norm, drops[1], HALF, ends_1)
        of_ff1_narrow = aside.run(_of_weight, of_f, a_1)
        of_h = residual_norm.swish_backward(_across(of_f, w[2]), h_1, drops[0].seed, drops[0].share, swish_1)
        of_ff1_wide = aside.run(_of_weight, of_h, normed)
        of_normed = _across(of_h, w[0])

        sums = parts.sum(0)
        aside.join()
        ends, swish_2, ends_3, conv, ends_2, of_qkv_bias, ends_1, swish_1 = sums.split([*sizes, 3 * width, wide])
        e_1, e_2, e_3, e_4 = (each.view(-1, width) for each in (ends_1, ends_2, ends_3, ends))
        of_conv = conv.view(-1, width)
        of_q, of_k, of_v = of_projections.split(width)
        of_q_bias, of_k_bias, of_v_bias = of_qkv_bias.split(width)
        found = [
            of_ff1_wide, swish_1, of_ff1_narrow, e_1[2], e_1[0], e_1[1],
            of_q, of_q_bias, of_k, of_k_bias, of_v, of_v_bias, of_out, e_2[2], e_2[0], e_2[1],
            of_pointwise_1, of_conv[kernel + 1 :], of_conv[:kernel].t(), of_conv[kernel],
            norm_sums[1] * moments[1], norm_sums[0], of_pointwise_2, e_3[2], e_3[0], e_3[1],
            of_ff2_wide, swish_2, of_ff2_narrow, e_4[2], e_4[0], e_4[1], of_positions, of_biases[0], of_biases[1],
            *((e_4[3], e_4[4]) if layer.has_following else ()),
        ]  # fmt: skip
        gradients = (each.reshape(shape) for each, shape in zip(found, ctx.shapes, strict=True))
        return None, of_t, of_normed, *gradients


def _of_positions(layer: _Layer, slopes: Tensor, qkv: Tensor, v: Tensor) -> Tensor:
    """Gradient of the weight that positions are multiplied with."""
    of_places = places_backward(slopes, qkv, v, layer.lengths, layer.heads)
    return _of_weight(of_places.to(qkv.dtype), layer.positions)


def _parts(like: Tensor, columns: int) -> Tensor:
    """Matrix of sums over rows, to be filled and added up."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(residual_norm.GROUPS, columns, dtype=dtype, device=like.device)
