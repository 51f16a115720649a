"""Random sub-blocks for the tests of the kernels, and how far results are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.recipes.speech.kernels.quartznet import reference
from paceline.recipes.speech.kernels.tiles import padded_frames


@dataclass
class Case:
    """The tensors of one depthwise convolution, as a network in training would have them."""

    x: Tensor
    affine: Tensor | None
    moments: Tensor | None
    lengths_in: Tensor
    lengths_out: Tensor
    weight: Tensor
    g: Tensor
    added: Tensor | None
    stride: int
    dilation: int

    @property
    def row_out(self) -> int:
        return self.g.shape[-1]

    def forward(self, function: Any, **more: Any) -> Tensor:
        found: Tensor = function(
            self.x,
            self.affine,
            self.lengths_in,
            self.lengths_out,
            self.weight,
            self.row_out,
            self.stride,
            self.dilation,
            **more,
        )
        return found

    def backward(self, function: Any, *, needs_data: bool = True, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the input, of the weight, and the two sums."""
        data, weight_parts, sum_parts = function(
            self.g,
            self.x,
            self.affine,
            self.moments,
            self.added,
            self.lengths_in,
            self.lengths_out,
            self.weight,
            self.stride,
            self.dilation,
            needs_data=needs_data,
            **more,
        )
        return data, weight_parts.sum(0), sum_parts.sum(0)

    def exact(self) -> Case:
        """The same numbers, for a reference in float64."""
        fields = dict(self.__dict__)
        return Case(
            **{k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in fields.items()}
        )


def make_case(
    kernel: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    frames: int = 50,
    batch: int = 3,
    channels: int = 2,
    has_affine: bool = True,
    has_added: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Weights and scales on the grid of bfloat16, so that only what a kernel computes is rounded, and only once."""
    dice = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice)

    row, out = padded_frames(frames), -(-frames // stride)
    lengths = torch.randint(frames // 2, frames + 1, (batch,), generator=dice, dtype=torch.int32)
    lengths[0] = frames
    if batch > 1:
        lengths[1] = 0  # an utterance without frames
    after = ((lengths + stride - 1) // stride).to(torch.int32)
    case = Case(
        x=draw(channels, batch, row).bfloat16(),
        affine=draw(2, channels).bfloat16().float() if has_affine else None,
        moments=draw(3, channels) if has_affine else None,
        lengths_in=lengths,
        lengths_out=after,
        weight=draw(channels, 1, kernel).bfloat16().float(),
        g=draw(channels, batch, padded_frames(out)).bfloat16() * reference.held(after, padded_frames(out)),
        added=draw(channels, batch, row).bfloat16() if has_added else None,
        stride=stride,
        dilation=dilation,
    )
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.__dict__.items()}
    return Case(**moved)


def distance(found: Tensor, expected: Tensor) -> float:
    """Of the difference in norm, relative."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
