"""Conformer and FastConformer: convolutions that take fewer frames, then layers of feed-forward modules, attention over
the utterance and a convolution around each frame. Parameters have NeMo's names.

No output of an utterance depends on how far its batch was padded, in training neither: batch statistics are those of
speech frames.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.speech.network.acoustic_encoder import AcousticEncoder
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.recipes.speech.network.conformer.attention import (
    SelfAttention,
    dropped,
    new_biases,
    sinusoids,
    visible_frames,
)
from paceline.recipes.speech.network.conformer.convolution import ConvolutionModule
from paceline.recipes.speech.network.conformer.settings import ConformerSettings
from paceline.recipes.speech.network.conformer.subsampling import Subsampling
from paceline.recipes.speech.network.frames import Frames, frames_of


class ConformerEncoder(AcousticEncoder):
    """Features of mels to features of labels, at a lower rate."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__(settings)
        conformer = settings.conformer
        assert conformer is not None
        self.conformer = conformer
        self.pre_encode = Subsampling(conformer, settings.features.num_mels)
        is_shared = not conformer.untie_biases and conformer.self_attention_model == "rel_pos"
        biases = new_biases(conformer) if is_shared else None
        self.layers = nn.ModuleList(ConformerLayer(conformer, biases) for _ in range(conformer.n_layers))

    def forward(self, features: Tensor, lengths: Tensor, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        x, frames = self.pre_encode(features, frames_of(lengths, features.shape[-1]))
        x, positions = self.with_positions(x)
        visible = self.visible(x.shape[1], x.device)
        captured = []
        for number, layer in enumerate(self.layers):
            y = layer(x, positions, frames, visible)
            x = self.perhaps_without(number, x, y)
            if number in capture:
                captured.append(x)
        outputs = torch.cat([x, *captured]) if captured else x
        return outputs.transpose(1, 2), frames.lengths

    def with_positions(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what enters the first layer, and the positions that each layer adds to attention, (positions,
        width)."""
        settings, time = self.conformer, x.shape[1]
        kind = settings.self_attention_model
        if settings.xscaling:
            x = x * math.sqrt(settings.d_model)
        if kind == "abs_pos":
            numbers = torch.arange(time, dtype=torch.float32, device=x.device)
            x = x + sinusoids(numbers, settings.d_model).to(x.dtype)
            return dropped(x, settings.dropout_pre_encoder, self.training), None
        last = time - 1 if kind == "rel_pos" else settings.att_context_size[0][0]
        numbers = torch.arange(last, -last - 1, -1, dtype=torch.float32, device=x.device)
        positions = sinusoids(numbers, settings.d_model).to(x.dtype)
        before = settings.dropout if kind == "rel_pos_local_attn" else settings.dropout_pre_encoder  # as in NeMo
        positions = dropped(positions, settings.dropout_emb, self.training)
        return dropped(x, before, self.training), positions

    def visible(self, time: int, device: torch.device) -> Tensor | None:
        """(time, time) bool: which frames attention may see; None where it may see all, or within its own window."""
        settings = self.conformer
        if settings.self_attention_model == "rel_pos_local_attn":
            return None
        contexts, style = settings.att_context_size, settings.att_context_style
        if not self.training or len(contexts) == 1:
            return visible_frames(contexts[0], style, time, device)
        # Drawn on the device, which nobody waits for.
        masks = [visible_frames(context, style, time, device) for context in contexts]
        everything = torch.ones(time, time, dtype=torch.bool, device=device)
        shares = settings.att_context_probs or [1 / len(contexts)] * len(contexts)
        limits = torch.tensor(shares, dtype=torch.float32, device="cpu").cumsum(0)[:-1].to(device)
        drawn = (torch.rand(1, dtype=torch.float32, device=device) >= limits).sum(0, keepdim=True)
        return torch.stack([everything if mask is None else mask for mask in masks])[drawn].squeeze(0)

    def perhaps_without(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        """Return a layer's output `y`, or sometimes in training its input `x` instead; what it adds is larger in the
        other cases, so that it is the same on average."""
        share = self.conformer.drop_probability(number)
        if not self.training or share == 0.0:
            return y
        factor = (torch.rand((), dtype=torch.float32, device=x.device) >= share).to(x.dtype) / (1.0 - share)
        return x + (y - x) * factor


class ConformerLayer(nn.Module):
    """Half a feed-forward module, attention, convolution, the other half, each added to what it reads; a norm."""

    def __init__(self, settings: ConformerSettings, biases: tuple[nn.Parameter, nn.Parameter] | None = None) -> None:
        super().__init__()
        width = settings.d_model
        self.norm_feed_forward1 = nn.LayerNorm(width)
        self.feed_forward1 = FeedForward(settings)
        self.norm_conv = nn.LayerNorm(width)
        self.conv = ConvolutionModule(settings)
        self.norm_self_att = nn.LayerNorm(width)
        self.self_attn = SelfAttention(settings, biases)
        self.norm_feed_forward2 = nn.LayerNorm(width)
        self.feed_forward2 = FeedForward(settings)
        self.dropout = make_dropout(settings.dropout)
        self.norm_out = nn.LayerNorm(width)

    def forward(self, x: Tensor, positions: Tensor | None, frames: Frames, visible: Tensor | None) -> Tensor:
        """(batch, time, width) -> the same."""
        x = x + 0.5 * self.dropout(self.feed_forward1(self.norm_feed_forward1(x)))
        x = x + self.dropout(self.self_attn(self.norm_self_att(x), positions, frames.lengths, visible))
        x = x + self.dropout(self.conv(self.norm_conv(x), frames))
        x = x + 0.5 * self.dropout(self.feed_forward2(self.norm_feed_forward2(x)))
        y: Tensor = self.norm_out(x)
        return y


class FeedForward(nn.Module):
    """Wide, Swish, narrow."""

    def __init__(self, settings: ConformerSettings) -> None:
        super().__init__()
        self.linear1 = nn.Linear(settings.d_model, settings.d_ff, bias=settings.use_bias)
        self.dropout = make_dropout(settings.dropout)
        self.linear2 = nn.Linear(settings.d_ff, settings.d_model, bias=settings.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear2(self.dropout(F.silu(self.linear1(x))))
        return y


def make_dropout(share: float) -> nn.Module:
    """Dropout of 0 would still draw a number for every activation."""
    return nn.Dropout(share) if share > 0 else nn.Identity()
