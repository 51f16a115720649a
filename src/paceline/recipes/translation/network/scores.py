"""Last layer of a network: scores of all units, or their loss, for which large batches need no scores in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.translation.text.vocabulary import PAD
from paceline.speed.layers.head_loss import MOST_LOGITS, linear_cross_entropy
from paceline.speed.layers.occurrences import Occurrences
from paceline.speed.layers.packed_attention import Packing


class Packings(NamedTuple):
    """Sentences that lie one after the other without padding: where they are, and where each unit occurs."""

    source: Packing
    target: Packing
    in_source: Occurrences
    in_target: Occurrences


class ScoresTokens(nn.Module):
    """Base of networks that write one unit after the other."""

    embedding: nn.Embedding
    target_embedding: nn.Embedding | None
    output: nn.Linear | None
    is_chunked = False
    """True if the loss never has all scores in memory; else only where they are more than a chunk."""

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        truth: Tensor | None = None,
        smoothing: float = 0.0,
        packings: Packings | None = None,
    ) -> Tensor:
        """Return (batch, target time, vocabulary): the scores of what follows each token of `target`.

        With `truth`, which is what follows, the sum of the losses instead.
        """
        hidden = self.hidden(source, target, packings)
        if truth is None:
            return self.head(hidden)
        if self.is_chunked or truth.numel() * len(self.head_weight) > MOST_LOGITS:
            total, _ = linear_cross_entropy(
                hidden, self.head_weight, truth, label_smoothing=smoothing, ignore_index=PAD
            )
            return total
        return smoothed_loss(self.head(hidden), truth, smoothing)

    def hidden(self, source: Tensor, target: Tensor, packings: Packings | None = None) -> Tensor:
        """Return (batch, target time, width), from which the last layer computes scores; (tokens, width) if packed."""
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """Rows of the last layer, one per unit."""
        if self.output is not None:
            return self.output.weight
        return (self.target_embedding or self.embedding).weight


def smoothed_loss(logits: Tensor, truth: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy with labels of which a share is spread over all units, summed over tokens.

    In float32 at least, also of weights in half precision: smoothing sums over tokens and units, more than fp16 holds.
    """
    scores = logits.flatten(0, -2)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(wide, truth.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
