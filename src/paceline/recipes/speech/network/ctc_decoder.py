"""Decoder of CTC: one layer that reads labels off each frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Decoder(nn.Module):
    """Log-probabilities of labels and blank at each frame."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, num_classes, 1)
        nn.init.xavier_uniform_(self.conv.weight)

    def forward(self, encoded: Tensor) -> Tensor:
        """(batch, channels, time) -> (batch, time, classes) in float32, or float64 if it was computed in that."""
        if self.training and encoded.stride(1) == 1:  # a frame's channels side by side: one product as it lies
            scores = F.linear(encoded.transpose(1, 2), self.conv.weight.squeeze(2), self.conv.bias)
        else:
            scores = self.conv(encoded).transpose(1, 2)
        return F.log_softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the network's computation without autocast."""
        return self.conv.weight.dtype
