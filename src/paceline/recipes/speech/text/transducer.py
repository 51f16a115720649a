"""Transducer loss (RNN-T): minus the log-probability of a transcript, summed over all ways to write it along the
frames.

Graves 2012, "Sequence transduction with recurrent neural networks" (arXiv 1211.3711). At frame t, with u labels
written, a network either goes on to the next frame (blank) or writes label u. A path begins at (0, 0) and ends when the
last frame is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MOST_LOGITS = 2**26
"""Scores of a chunk: 128 MiB in bfloat16."""


def transducer_loss_sum(
    scores_of: Callable[[Tensor, Tensor], Tensor],
    frames: Tensor,
    states: Tensor,
    targets: Tensor,
    frame_lengths: list[int],
    target_lengths: list[int],
    *,
    num_classes: int,
    fastemit: float = 0.0,
    most_logits: int = MOST_LOGITS,
) -> Tensor:
    """Return the sum of the losses of a batch, in nats; the blank is the last class.

    `scores_of` gives scores (batch, frames, labels + 1, classes), not normalised, for `frames` (batch, frames, width)
    and `states` (batch, labels + 1, width), those of a text before each label and behind the last; `targets` is
    (batch, labels), padded with anything. Lengths are numbers on the host: whatever lies behind them is not looked at,
    and an utterance without frames adds exactly 0 to the loss and to every gradient.

    Scores are computed for so many utterances at a time that they stay below `most_logits`; where that takes several
    chunks, backward computes them once more instead of keeping them. `fastemit` adds that share of the gradients of
    labels, so that they are written earlier (arXiv 2010.11148); the loss stays what it is.
    """
    total = frames.new_zeros((), dtype=torch.promote_types(frames.dtype, torch.float32))
    chunks = _chunks(frame_lengths, target_lengths, num_classes, most_logits)
    for first, last in chunks:
        num_frames, num_labels = frame_lengths[first:last], target_lengths[first:last]
        longest, most = max(num_frames), max(num_labels)
        part = (frames[first:last, :longest], states[first:last, : most + 1], targets[first:last, :most])

        def arcs(frames: Tensor, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return arc_log_probs(scores_of(frames, states), targets)

        if longest == 0:
            blank, label = arcs(*part)
            total = total + (blank.sum() + label.sum())  # of nothing: 0, with gradients of 0
        elif len(chunks) == 1 or not torch.is_grad_enabled():
            blank, label = arcs(*part)
            total = total + lattice_losses(blank, label, num_frames, num_labels, fastemit).sum()
        else:
            blank, label = checkpoint(arcs, *part, use_reentrant=False)
            total = total + lattice_losses(blank, label, num_frames, num_labels, fastemit).sum()
    return total


def _chunks(frames: list[int], labels: list[int], num_classes: int, most_logits: int) -> list[tuple[int, int]]:
    """Return which utterances, in their order, have their scores computed together."""
    chunks: list[tuple[int, int]] = []
    first = longest = most = 0
    for number, (length, size) in enumerate(zip(frames, labels, strict=True)):
        longest, most = max(longest, length), max(most, size)
        if number > first and (number + 1 - first) * longest * (most + 1) * num_classes > most_logits:
            chunks.append((first, number))
            first, longest, most = number, length, size
    return [*chunks, (first, len(frames))]


def arc_log_probs(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the blank, (batch, frames, labels + 1), and of the label that comes next, (batch,
    frames, labels), from scores (batch, frames, labels + 1, classes); in float32, or float64 if the scores are.

    No normalised scores are kept: backward makes them again of what there is.
    """
    blank, label = _Arcs.apply(scores, targets)  # type: ignore[no-untyped-call]
    return blank, label


class _Arcs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        total = wide.logsumexp(-1)
        places = _places(scores, targets)
        ctx.save_for_backward(scores, total, places)
        label = wide[:, :, :-1].gather(-1, places).squeeze(-1)
        return wide[..., -1] - total, label - total[:, :, :-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        scores, total, places = ctx.saved_tensors
        of_blank, of_label = gradients
        weight = of_blank.clone()
        weight[:, :, :-1] += of_label
        found = (scores.to(total.dtype) - total.unsqueeze(-1)).exp_().mul_(-weight.unsqueeze(-1))
        found[..., -1] += of_blank
        found[:, :, :-1].scatter_add_(-1, places, of_label.unsqueeze(-1))
        return found.to(scores.dtype), None


def _places(scores: Tensor, targets: Tensor) -> Tensor:
    """(batch, frames, labels, 1): the class that comes next; padding may be any number, and counts as class 0."""
    batch, frames, states, classes = scores.shape
    inside = torch.where((targets >= 0) & (targets < classes), targets, 0).to(scores.device, torch.int64)
    return inside.view(batch, 1, states - 1, 1).expand(batch, frames, states - 1, 1)


def lattice_losses(
    blank: Tensor, label: Tensor, frame_lengths: list[int], target_lengths: list[int], fastemit: float = 0.0
) -> Tensor:
    """Return the losses of a batch, (batch,), from log-probabilities of blanks (batch, frames, labels + 1) and labels
    (batch, frames, labels).

    Sums over paths are made in float64, along anti-diagonals: all places of the lattice that are equally many steps
    away from the beginning are one row. The gradient is the closed form, minus the share of all paths that go through
    an arc.
    """
    losses: Tensor = _Lattice.apply(  # type: ignore[no-untyped-call]
        blank, label, frame_lengths, target_lengths, fastemit
    )
    return losses


class _Lattice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blank: Tensor, label: Tensor, frames: list[int], labels: list[int], fastemit: float
    ) -> Tensor:
        device = blank.device
        lengths = torch.tensor([frames, labels], dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        lattice = _Diagonals(blank, label, lengths[0], lengths[1])
        behind = lattice.to_end()
        total = behind[0, :, 0]
        is_heard = lengths[0] > 0
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            shares = lattice.shares(behind, torch.where(is_heard, total, torch.inf))
            ctx.save_for_backward(*(share.to(blank.dtype) for share in shares))
            ctx.fastemit = fastemit
        return torch.where(is_heard, -total, 0.0).to(blank.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_blank, of_label = ctx.saved_tensors
        weight = -gradients[0].view(-1, 1, 1)
        return of_blank * weight, of_label * (weight * (1.0 + ctx.fastemit)), None, None, None


class _Diagonals:
    """A lattice by anti-diagonals: row n has the places (t, u) with t + u = n, as (n, batch, u). Arcs that begin
    outside of an utterance's own lattice have probability 0."""

    def __init__(self, blank: Tensor, label: Tensor, frames: Tensor, labels: Tensor) -> None:
        batch, time, states = blank.shape
        self.time, self.states = time, states
        is_frame = torch.arange(time, device=blank.device) < frames.view(-1, 1)
        place = torch.arange(states, device=blank.device)
        inside = is_frame.unsqueeze(2) & (place <= labels.view(-1, 1)).unsqueeze(1)
        is_label = is_frame.unsqueeze(2) & (place[:-1] < labels.view(-1, 1)).unsqueeze(1)
        self.blank = self._skewed(torch.where(inside, blank.double(), -torch.inf))
        label = torch.where(is_label, label.double(), -torch.inf)
        self.label = self._skewed(torch.cat([label, label.new_full((batch, time, 1), -torch.inf)], 2))
        number = torch.arange(time + states, device=blank.device).view(-1, 1, 1)
        self.is_end = (number == (frames + labels).view(1, -1, 1)) & (place == labels.view(-1, 1))

    def to_end(self) -> Tensor:
        """(n, batch, u): log-probability of all ways from each place to the end, one row more than places have."""
        rows = torch.where(self.is_end, 0.0, -torch.inf).double()
        for number in range(self.time + self.states - 2, -1, -1):
            after = rows[number + 1]
            here = after + self.blank[number]
            written = after[:, 1:] + self.label[number, :, :-1]
            here[:, :-1] = torch.logaddexp(here[:, :-1], written)
            rows[number] = torch.logaddexp(rows[number], here)
        return rows

    def from_start(self) -> Tensor:
        """(n, batch, u): log-probability of all ways from the beginning to each place."""
        rows = torch.full_like(self.blank, -torch.inf)
        rows[0, :, 0] = 0.0
        for number in range(1, self.time + self.states - 1):
            before = rows[number - 1]
            here = before + self.blank[number - 1]
            written = before[:, :-1] + self.label[number - 1, :, :-1]
            here[:, 1:] = torch.logaddexp(here[:, 1:], written)
            rows[number] = here
        return rows

    def shares(self, behind: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return which share of all paths goes through each blank, (batch, frames, labels + 1), and each label."""
        before = self.from_start() - total.view(-1, 1)
        of_blank = (before + self.blank + behind[1:]).exp_()
        of_label = (before[..., :-1] + self.label[..., :-1] + behind[1:, :, 1:]).exp_()
        of_label = torch.cat([of_label, torch.zeros_like(of_label[..., :1])], 2)
        return self._straight(of_blank), self._straight(of_label)[..., :-1]

    def _skewed(self, values: Tensor) -> Tensor:
        """(batch, time, states) -> (time + states - 1, batch, states)."""
        batch, time, states = values.shape
        rows = values.new_full((time + states - 1, batch, states), -torch.inf)
        self._along(rows).copy_(values)
        return rows

    def _straight(self, rows: Tensor) -> Tensor:
        """(time + states - 1, batch, states) -> (batch, time, states)."""
        return self._along(rows.contiguous()).contiguous()

    def _along(self, rows: Tensor) -> Tensor:
        """View rows as (batch, time, states): a step in u is one of a row, too."""
        _, batch, states = rows.shape
        step = batch * states
        return rows.as_strided((batch, self.time, states), (states, step, step + 1))
