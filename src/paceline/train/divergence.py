"""Decide whether a run has diverged: its weights are lost, or it does not learn any more. Values in, verdict out.

A run has diverged if
- a trained weight or a statistic of batch norm is not finite: looked at whenever the run is saved;
- the loss stays beyond `max_loss_ratio` times the largest first loss of a stage, and never less than that many times 1:
  ten losses in a row, or half of a run that is shorter than twenty steps;
- more than half of its steps, and of at least twenty, were skipped because their gradients were not finite.

One bad batch, or the first steps of fp16 while the loss scale settles, are none of these. Losses are of all ranks,
so that these come to the same verdict.

A run whose loss climbs back to where it began has not diverged by these rules, and may recover: it goes on, and says so
(`EpochLosses`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.core.torch_private import BatchNorm, foreach_norm
from paceline.parallel.averaged.flat_average import by_kind
from paceline.train.prepare import Prepared

IN_A_ROW = 10
"""Losses beyond the limit that are enough for a verdict."""
MIN_STEPS = 20
"""Steps from which on the share of skipped ones says something."""
LEARNED, RELAPSED = 0.2, 0.75
"""A loss that fell by the first share of an early epoch's was learned; the second share of that lost again is told."""


class Diverged(Exception):
    """Ends the training loop: the run has diverged, and why. All ranks raise it at the same place."""


class LossWatch:
    """Follows the losses of a run."""

    def __init__(self, max_ratio: float | None, first_loss: float | None = None) -> None:
        """`max_ratio` is the setting `max_loss_ratio`; a resumed run passes the `first_loss` of its position."""
        self._max_ratio = max_ratio
        self.first_loss = first_loss
        """Largest loss, by its size, of the first step of a stage."""
        self._last = math.nan
        self.in_a_row = 0
        """Finite losses beyond the limit, up to the last one."""

    def note(self, losses: Iterable[tuple[int, float]], stage_began: int) -> None:
        """Take (step, loss) of all ranks into account, in a stage that began with step `stage_began`."""
        for step, loss in losses:
            size = abs(loss)
            if not math.isfinite(size):
                continue  # such a step is skipped, and counted as that
            if self.first_loss is None or step == stage_began:
                self.first_loss = max(size, self.first_loss or 0.0)
            self._last = loss
            is_beyond = self._max_ratio is not None and size > self._max_ratio * max(self.first_loss, 1.0)
            self.in_a_row = self.in_a_row + 1 if is_beyond else 0

    def verdict(self, num_steps: int, *, is_over: bool = False) -> str | None:
        """Return why the run has diverged after `num_steps`, None if it has not; `is_over` if no step follows."""
        enough = min(IN_A_ROW, max(1, num_steps // 2)) if is_over else IN_A_ROW
        if self.in_a_row < enough:
            return None
        return (
            f"the loss is {self._last:.3g}, after {self.first_loss:.3g} at first, "
            f"more than `--max-loss-ratio` ({self._max_ratio:g}) allows"
        )


class EpochLosses:
    """Follows the mean losses of the epochs of a stage, for one that climbs back to where it began."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._first = self._best = math.nan
        self._is_told = False

    def note(self, stage: str | None, loss: float) -> str | None:
        """Return what to say of an epoch with this loss, once until there is a lower one; None if nothing."""
        if stage != self._stage or math.isnan(self._first):
            self._stage, self._first, self._best, self._is_told = stage, loss, loss, False
            return None
        if loss < self._best:
            self._best, self._is_told = loss, False
        won = self._first - self._best
        has_relapsed = won > LEARNED * abs(self._first) and not loss - self._best < RELAPSED * won
        if not has_relapsed or self._is_told:
            return None
        self._is_told = True
        return f"the loss is {loss:.4g}, after {self._best:.4g} at best and {self._first:.4g} in the first epoch"


def judge_skips(skipped: int, num_steps: int) -> str | None:
    """Return why a run whose steps were skipped for non-finite gradients has diverged, None if it has not."""
    if num_steps < MIN_STEPS or 2 * skipped <= num_steps:
        return None
    return f"{skipped} of {num_steps} steps were skipped: their gradients were not finite"


def judge_weights(names: Sequence[str]) -> str | None:
    """Return why a run with these weights that are not finite has diverged, None if there are none."""
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"weights are not finite: {', '.join(names[:3])}{more}"


def not_finite(prepared: Prepared) -> list[str]:
    """Return the names of trained weights and of batch-norm statistics that are not finite (waits for the device).

    Other buffers may hold infinities on purpose, such as masks.
    """
    trained = {name for name, parameter in prepared.model.named_parameters() if parameter.requires_grad}
    tensors = {name: tensor for name, tensor in prepared.named_weights().items() if name in trained}
    for prefix, module in prepared.model.named_modules():
        if isinstance(module, BatchNorm) and module.running_mean is not None and module.running_var is not None:
            tensors |= {f"{prefix}.running_mean": module.running_mean, f"{prefix}.running_var": module.running_var}
    names = {id(tensor): name for name, tensor in tensors.items()}
    found = []
    for group in by_kind([tensor for tensor in tensors.values() if tensor.numel() and tensor.is_floating_point()]):
        for tensor, largest in zip(group, _largest(group), strict=True):
            if not math.isfinite(largest):
                found.append(names[id(tensor)])
    return sorted(found)


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest size of an element of each tensor, in one transfer; nan where there is one."""
    sizes: list[float] = torch.stack(foreach_norm(list(tensors), math.inf)).tolist()
    return sizes
