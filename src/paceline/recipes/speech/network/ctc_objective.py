"""Loss of a training pass that reads an utterance several times: from layers in the middle (InterCTC, arXiv 2102.03216)
and with two sets of masks that must agree (consistency-regularised CTC, arXiv 2410.05101)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.recipes.speech.text.ctc import Lengths, ctc_loss_sum


@dataclass(frozen=True)
class Objective:
    """Weights of the passes of a batch in one loss: (1 - `inter_weight`) of the last layer's CTC, `inter_weight` of the
    mean of those in the middle, each the mean of the views', and `consistency_weight` of their divergence."""

    num_layers: int = 1
    """Layers that are read, the last one included."""
    views: int = 1
    inter_weight: float = 0.0
    consistency_weight: float = 0.0

    def loss_sum(self, log_probs: Tensor, targets: Tensor, frames: Lengths, labels: Lengths) -> Tensor:
        """Return the loss summed over the utterances of a batch, in nats.

        `log_probs` is ((layer, view, batch) flat, frames, classes); the rest is of the batch, as in `ctc_loss_sum`.
        """
        if self.num_layers == self.views == 1:
            return ctc_loss_sum(log_probs, targets, frames, labels)
        by_layer = log_probs.unflatten(0, (self.num_layers, -1))
        loss = self._ctc(by_layer[0], targets, frames, labels)
        if self.num_layers > 1:
            inner = self._ctc(by_layer[1:].flatten(0, 1), targets, frames, labels) / (self.num_layers - 1)
            loss = (1 - self.inter_weight) * loss + self.inter_weight * inner
        if self.views > 1:
            first, second = by_layer[0].unflatten(0, (self.views, -1)).unbind()
            loss = loss + self.consistency_weight * divergence_sum(first, second, frames)
        return loss

    def _ctc(self, log_probs: Tensor, targets: Tensor, frames: Lengths, labels: Lengths) -> Tensor:
        times = len(log_probs) // len(targets)
        passes = ctc_loss_sum(log_probs, targets.repeat(times, 1), _repeated(frames, times), _repeated(labels, times))
        return passes / self.views


def divergence_sum(first: Tensor, second: Tensor, frames: Lengths) -> Tensor:
    """Return the mean of the two Kullback-Leibler divergences from one view to the other, summed over frames and
    utterances: each learns what the other says, which is taken as it is. (batch, frames, classes) both."""
    if not isinstance(frames, Tensor):
        frames = torch.tensor(frames, dtype=torch.int64, device="cpu")
    frames = frames.to(first.device, non_blocking=True)
    is_speech = torch.arange(first.shape[1], device=first.device) < frames[:, None]
    total = _divergence(second, first) + _divergence(first, second)
    return torch.where(is_speech, total, 0.0).sum() / 2


def _divergence(target: Tensor, log_probs: Tensor) -> Tensor:
    """(batch, frames) from (batch, frames, classes)."""
    target = target.detach()
    return (target.exp() * (target - log_probs)).sum(-1)


def _repeated(lengths: Lengths, times: int) -> Lengths:
    return lengths.repeat(times) if isinstance(lengths, Tensor) else list(lengths) * times
