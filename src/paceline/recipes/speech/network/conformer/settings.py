"""Settings of a Conformer encoder (arXiv 2005.08100) and of its faster form (FastConformer, arXiv 2305.05084).

Names and defaults are those of NeMo's `ConformerEncoder`, so that its files can be read line by line.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.settings import Fraction, Positive, Section
from paceline.recipes.speech.network.frames import strided_length

Width = Annotated[int, Field(gt=0, le=100_000)]
Context = tuple[int, int]
"""Frames that attention sees before and after each one; -1: all."""
UNLIMITED: Context = (-1, -1)
KERNEL = 3
"""Of the convolutions that take fewer frames, each of stride 2."""


class ConformerSettings(Section):
    """Sizes, attention and convolution of a Conformer's layers, and how frames become fewer before them."""

    d_model: Width
    """Channels of a layer."""
    n_layers: Annotated[int, Field(gt=0, le=1000)]
    """Layers: half a feed-forward module, attention, convolution, the other half."""
    n_heads: Positive = 4
    """Heads of attention; they divide `d_model`."""
    subsampling: Literal["striding", "dw_striding"] = "striding"
    """Convolutions of stride 2 over time and mels: over all channels at once, or separable (FastConformer)."""
    subsampling_factor: Literal[2, 4, 8, 16] = 4
    """Mel frames for each frame that layers see."""
    subsampling_conv_channels: Annotated[int, Field(ge=-1, le=100_000)] = -1
    """Channels of these convolutions; -1: `d_model`."""
    causal_downsampling: bool = False
    """Take fewer frames without looking ahead, for streams."""
    ff_expansion_factor: Positive = 4
    """How much wider the middle of a feed-forward module is."""
    self_attention_model: Literal["rel_pos", "rel_pos_local_attn", "abs_pos"] = "rel_pos"
    """Positions relative to each frame (Transformer-XL), the same within a window in memory that grows with the length
    and not with its square, or absolute ones."""
    att_context_size: tuple[Context, ...] = (UNLIMITED,)
    """Frames before and after that attention sees, -1: all. Of several, training draws one for each grain, and
    inference takes the first."""
    att_context_probs: tuple[float, ...] = ()
    """How often each of several contexts is drawn; equally often if not set."""
    att_context_style: Literal["regular", "chunked_limited"] = "regular"
    """A window around each frame, or chunks of `right + 1` frames that see themselves and `left` frames before."""
    xscaling: bool = True
    """Multiply what enters the first layer by the root of `d_model`."""
    untie_biases: bool = True
    """Every layer has its own biases of content and position."""
    conv_kernel_size: Width = 31
    """Frames that the convolution of a layer sees; odd."""
    conv_norm_type: Literal["batch_norm", "layer_norm"] = "batch_norm"
    """Norm after that convolution; batch statistics are of speech frames only."""
    conv_context_size: Literal["causal"] | Context | None = None
    """Frames before and after, one less than the kernel together; `causal`: none after. If not set, half on each
    side."""
    use_bias: bool = True
    """Linear layers and convolutions of the layers have biases."""
    dropout: Fraction = 0.1
    """Share dropped in feed-forward modules and of what each module adds."""
    dropout_pre_encoder: Fraction = 0.1
    """Share dropped of what enters the first layer."""
    dropout_emb: Fraction = 0.1
    """Share dropped of the positions."""
    dropout_att: Fraction = 0.0
    """Share of attention dropped."""
    stochastic_depth_drop_prob: Fraction = 0.0
    """How often a layer is left out in training (arXiv 2102.03216)."""
    stochastic_depth_mode: Literal["linear", "uniform"] = "linear"
    """Rising to that probability from the first layer to the last, or the same for all."""
    stochastic_depth_start_layer: Positive = 1
    """The first so many layers are never left out."""

    @field_validator("att_context_size", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Take one pair, or nothing, as NeMo writes them."""
        if value is None:
            return (UNLIMITED,)
        if isinstance(value, list | tuple) and value and not isinstance(value[0], list | tuple):
            return (tuple(value),)
        return value

    @field_validator("att_context_probs", mode="before")
    @classmethod
    def _none_set(cls, value: Any) -> Any:
        return () if value is None else value

    @model_validator(mode="after")
    def _buildable(self) -> ConformerSettings:
        wrong = [*self._wrong_sizes(), *self._wrong_contexts()]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _wrong_sizes(self) -> list[str]:
        wrong = []
        if self.d_model % self.n_heads:
            wrong.append(f"n_heads {self.n_heads} does not divide d_model {self.d_model}")
        if self.d_model % 2:
            wrong.append(f"d_model {self.d_model} is odd: positions are pairs of sine and cosine")
        if self.conv_kernel_size % 2 == 0:
            wrong.append(f"conv_kernel_size {self.conv_kernel_size} is even and has no middle frame")
        if self.subsampling_conv_channels == 0:
            wrong.append("subsampling_conv_channels is 0; -1 stands for d_model")
        before, after = self.conv_context
        if min(before, after) < 0 or before + after + 1 != self.conv_kernel_size:
            wrong.append(
                f"conv_context_size {before}, {after} and the frame itself are not {self.conv_kernel_size}, the kernel"
            )
        if self.stochastic_depth_start_layer > self.n_layers:
            wrong.append(f"stochastic_depth_start_layer {self.stochastic_depth_start_layer} is behind the last layer")
        return wrong

    def _wrong_contexts(self) -> list[str]:
        wrong = []
        contexts, probabilities = self.att_context_size, self.att_context_probs
        if not contexts:
            wrong.append("att_context_size is empty; [-1, -1] is all frames")
        if any(size < -1 for context in contexts for size in context):
            wrong.append("att_context_size has frames below -1, which stands for all")
        if probabilities and (len(probabilities) != len(contexts) or abs(sum(probabilities) - 1) > 1e-6):
            wrong.append(f"att_context_probs must be {len(contexts)} numbers that add up to 1, one per context")
        if probabilities and min(probabilities) < 0:
            wrong.append("att_context_probs has numbers below 0")
        if self.self_attention_model == "rel_pos_local_attn":
            before, after = contexts[0] if contexts else UNLIMITED
            if len(contexts) > 1 or before != after or before < 1:
                wrong.append(
                    "rel_pos_local_attn needs one att_context_size with as many frames before as after, at least 1, "
                    "such as [128, 128]; unequal ones are a mask of rel_pos"
                )
            if self.att_context_style != "regular":
                wrong.append("att_context_style chunked_limited is a mask of rel_pos, not of rel_pos_local_attn")
        elif self.att_context_style == "chunked_limited":
            for before, after in contexts:
                if after < 0 and len(contexts) == 1:
                    wrong.append("chunked_limited needs a limit on the right of att_context_size")
                elif before > 0 and after >= 0 and before % (after + 1):
                    wrong.append(f"att_context_size {before}, {after}: {before} is no multiple of a chunk, {after + 1}")
        return wrong

    @property
    def conv_context(self) -> Context:
        """Frames before and after that the convolution of a layer sees."""
        if self.conv_context_size is None:
            half = (self.conv_kernel_size - 1) // 2
            return half, self.conv_kernel_size - 1 - half
        return (self.conv_kernel_size - 1, 0) if self.conv_context_size == "causal" else self.conv_context_size

    @property
    def num_strides(self) -> int:
        """Convolutions of stride 2."""
        return int(math.log2(self.subsampling_factor))

    @property
    def conv_channels(self) -> int:
        """Channels of the convolutions that take fewer frames."""
        return self.d_model if self.subsampling_conv_channels == -1 else self.subsampling_conv_channels

    @property
    def d_ff(self) -> int:
        """Width of the middle of a feed-forward module."""
        return self.d_model * self.ff_expansion_factor

    def output_length(self, frames: int) -> int:
        """Frames, or mels, that are left of so many."""
        for _ in range(self.num_strides):
            frames = frames // 2 + 1 if self.causal_downsampling else strided_length(frames, 2)
        return frames

    def drop_probability(self, layer: int) -> float:
        """How often a layer, counted from 0, is left out in training."""
        first = self.stochastic_depth_start_layer
        if layer < first:
            return 0.0
        if self.stochastic_depth_mode == "uniform":
            return self.stochastic_depth_drop_prob
        return self.stochastic_depth_drop_prob * (layer - first + 1) / (self.n_layers - first)

    def num_weights(self, num_mels: int) -> int:
        """Weights of the products, biases and norms left out."""
        wide, channels = self.d_model, self.conv_channels
        layer = 4 * wide * self.d_ff + 5 * wide * wide + 3 * wide * wide + wide * self.conv_kernel_size
        strides = (self.num_strides - 1) * channels * (channels * (KERNEL**2 if self.subsampling == "striding" else 1))
        return self.n_layers * layer + strides + channels * self.output_length(num_mels) * wide
