"""Fast parts of sequence models for any task: head and loss, dropout with residual and norm, packed attention."""

from __future__ import annotations

from paceline.speed.layers.added_norm import DropoutAddNorm, dropout_add_norm
from paceline.speed.layers.head_loss import LinearCrossEntropy, linear_cross_entropy
from paceline.speed.layers.packed_attention import Packing, packed_attention

__all__ = [
    "DropoutAddNorm",
    "LinearCrossEntropy",
    "Packing",
    "dropout_add_norm",
    "linear_cross_entropy",
    "packed_attention",
]
