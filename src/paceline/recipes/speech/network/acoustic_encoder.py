"""Interface of all encoders: features of mels to features of labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.recipes.speech.network.config import NetworkSettings


class AcousticEncoder(nn.Module):
    """Interface of an encoder to its model, whatever it is made of."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, features: Tensor, lengths: Tensor, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """(batch, mel, time), (batch,) int64 -> (batch, channels, time after strides), (batch,) int64.

        What stands behind an utterance's length in the output means nothing. The outputs of the layers of `capture`
        follow that of the last one, along the batch; the lengths are for each of them.
        """
        raise NotImplementedError

    def trains_in_bfloat16(self, device: torch.device) -> bool:
        """Return True if a faster way may stand in for this pass: training under bfloat16 autocast, with no layer
        frozen."""
        if not torch.is_autocast_enabled(device.type) or torch.get_autocast_dtype(device.type) is not torch.bfloat16:
            return False
        return all(module.training for module in self.modules())

    def output_length(self, frames: int) -> int:
        """Frames that come out for so many that go in, without asking a device."""
        return self.settings.output_length(frames)
