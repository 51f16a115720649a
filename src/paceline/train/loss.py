"""The contract of a loss function, (sum, count), and the failures of a step."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from paceline.core.errors import PacelineError
from paceline.core.units import counted
from paceline.world.failure.board import EXIT_DIVERGED


class LossContract(PacelineError):
    """The loss function did not return (sum, count)."""

    reason: str
    sentence = (
        "the loss function {reason}; it must return the sum of the losses and the number of them, because a mean"
        " over one micro-batch cannot be joined exactly with the others'"
    )
    hint = "return (sum, count): e.g. F.cross_entropy(output, y, reduction='sum'), len(y)"


class NonFiniteLoss(PacelineError):
    """The very first loss is not a number."""

    value: float
    shapes: str
    sentence = "the loss is {value} at step 0 (data: {shapes})"
    hint = "look at the inputs and the initial weights: nothing has been trained yet"


class TooManySkipped(PacelineError):
    """No step has had finite gradients for a long while."""

    skipped: int
    step: int
    exit_code = EXIT_DIVERGED
    sentence = "gradients were not finite in {skipped:#step} in a row, up to step {step}"
    hint = (
        "in `metrics.jsonl` a loss that was not finite is null: if there is one, look at the data of the first such"
        " step; else lower `--lr`, set `--clip-norm` or a level of more precision; `--max-skipped` sets the limit"
    )


class NoGradients(PacelineError):
    """Backward reached no trainable parameter."""

    sentence = "the loss gave no gradient to any trainable parameter"
    hint = "is the loss detached from the model, or is everything frozen (`freeze`)?"


ALLOCATION_FAILURES = (
    "DefaultCPUAllocator",
    "out of memory",
    "OUT_OF_MEMORY",
    "ALLOC_FAILED",
    "Cannot allocate memory",
    "unable to mmap",
)
"""Words of errors that an allocator raises as a plain `RuntimeError`."""


class OutOfMemory(PacelineError):
    """A grain does not fit the device."""

    shapes: str
    num_samples: int
    num_grains: int | None
    """None in validation, whose batches are not cut."""
    detail: str
    sentence = "out of memory on a grain of {num_samples:#sample} ({shapes}): {detail}"
    hint = "{remedy}"

    @property
    def remedy(self) -> str:
        if self.num_grains is None:
            return f"validate with smaller batches: `--eval-batch {max(1, self.num_samples // 2)}`"
        return (
            f"cut the batch finer with `--grains {2 * self.num_grains}` (changes numerics, so in a "
            "new run), let `--split-on-oom` do so, recompute with `--checkpoint-activations`, or use "
            "a lower precision (`-O2`)"
        )


def unpack(result: Any) -> tuple[torch.Tensor, Any, Any]:
    """Return (sum, count, outputs) of what a loss function returned, checked."""
    if not isinstance(result, tuple):
        if isinstance(result, torch.Tensor):
            raise LossContract("returned a single tensor (a mean?)")
        raise LossContract(f"returned a {type(result).__name__}")
    if len(result) not in (2, 3):
        raise LossContract(f"returned {counted(len(result), 'value')}")
    total, count = result[0], result[1]
    if not isinstance(total, torch.Tensor) or total.dim() != 0:
        if isinstance(total, torch.Tensor):
            raise LossContract(f"returned a sum that is not a 0-dim tensor of shape {tuple(total.shape)}")
        raise LossContract(f"returned a sum that is not a 0-dim tensor ({type(total).__name__})")
    is_number = isinstance(count, (int, float, numbers.Number))
    if not is_number and not (isinstance(count, torch.Tensor) and count.dim() == 0):
        raise LossContract("returned a count that is not a number")
    if not total.requires_grad:
        raise NoGradients
    return total, count, result[2] if len(result) == 3 else None


class SkipCount:
    """Number of steps skipped for non-finite gradients, in all and in a row.

    Counted on the device where only the device knows, and read when something is logged anyway.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self._limit = limit
        self._in_all = 0
        self._in_row = 0
        self._on_device = torch.zeros(2, dtype=torch.float32, device=device)  # (in all, in a row)
        self._is_on_device = False

    def note(self, is_skipped: bool, step: int) -> None:
        """Count a step whose outcome the host knows."""
        if is_skipped:
            self._in_all += 1
            self._in_row += 1
            self.check(step)
        else:
            self._in_row = 0

    def note_on_device(self, found_inf: torch.Tensor) -> None:
        """Count a step whose outcome only the device knows, without waiting for it."""
        if not self._is_on_device:
            self._on_device.copy_(torch.tensor([self._in_all, self._in_row], dtype=torch.float32, device="cpu"))
            self._is_on_device = True
        self._on_device += found_inf
        self._on_device[1:] *= found_inf

    def check(self, step: int) -> None:
        """Raise `TooManySkipped` if as many steps in a row as allowed were skipped, as far as it has been read."""
        if self._in_row >= self._limit:
            raise TooManySkipped(self._in_row, step)

    def state(self) -> list[int]:
        """Return the number of skipped steps, in all and in a row (waits for the device)."""
        if self._is_on_device:
            self._in_all, self._in_row = (int(value) for value in self._on_device.tolist())
        return [self._in_all, self._in_row]

    def load(self, state: list[int]) -> None:
        self._in_all, self._in_row = state
        self._is_on_device = False
