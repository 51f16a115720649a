"""What a loss function owes the engine, and the small failures of a step."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from paceline.core.errors import PacelineError


class LossContract(PacelineError):
    """The loss function did not return (sum, count)."""

    hint = "return (sum, count): e.g. F.cross_entropy(output, y, reduction='sum'), len(y)"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the loss function {reason}; it must return the sum of the losses and the number of them, because a mean"
            " over one micro-batch cannot be joined exactly with the others'"
        )
        self.reason = reason


class NonFiniteLoss(PacelineError):
    """The very first loss is not a number."""

    hint = "look at the inputs and the initial weights: nothing has been trained yet"

    def __init__(self, value: float, shapes: str) -> None:
        super().__init__(f"the loss is {value} at step 0 (data: {shapes})")
        self.value = value


class TooManySkipped(PacelineError):
    """No step has had finite gradients for a long while."""

    hint = (
        "in `metrics.jsonl` a loss that was not finite is null: if there is one, look at the data of the first such"
        " step; else lower `--lr`, set `--clip-norm` or a level of more precision; `--max-skipped` sets the limit"
    )

    def __init__(self, skipped: int, step: int) -> None:
        super().__init__(f"gradients were not finite in {skipped} steps in a row, up to step {step}")
        self.skipped = skipped
        self.step = step


class NoGradients(PacelineError):
    """Backward reached no trainable parameter."""

    hint = "is the loss detached from the model, or is everything frozen (`freeze`)?"

    def __init__(self) -> None:
        super().__init__("the loss gave no gradient to any trainable parameter")


class ForeignParameters(PacelineError):
    """The optimizer updates parameters that the model does not have."""

    hint = "make them part of the model (a criterion's parameters too), so that ranks and checkpoints know them"

    def __init__(self, number: int) -> None:
        super().__init__(f"the optimizer updates {number} parameters that are not the model's")
        self.number = number


class OutOfMemory(PacelineError):
    """A grain does not fit the device."""

    def __init__(self, shapes: str, num_samples: int, num_grains: int | None, detail: str) -> None:
        super().__init__(f"out of memory on a grain of {num_samples} samples ({shapes}): {detail}")
        self.hint = (
            f"validate with smaller batches: `--eval-batch {max(1, num_samples // 2)}`"
            if num_grains is None
            else f"cut the batch finer with `--grains {2 * num_grains}` (changes numerics, so in a new run), recompute"
            " with `--checkpoint-activations`, or use a lower precision (`-O2`)"
        )
        self.shapes = shapes


def unpack(result: Any) -> tuple[torch.Tensor, Any, Any]:
    """(sum, count) or (sum, count, outputs) as returned by a loss function, checked."""
    if not isinstance(result, tuple):
        what = "a single tensor (a mean?)" if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
        raise LossContract(f"returned {what}")
    if len(result) not in (2, 3):
        raise LossContract(f"returned {len(result)} values")
    total, count = result[0], result[1]
    if not isinstance(total, torch.Tensor) or total.dim() != 0:
        shape = f"of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else f"({type(total).__name__})"
        raise LossContract(f"returned a sum that is not a 0-dim tensor {shape}")
    is_number = isinstance(count, (int, float, numbers.Number))
    if not is_number and not (isinstance(count, torch.Tensor) and count.dim() == 0):
        raise LossContract("returned a count that is not a number")
    if not total.requires_grad:
        raise NoGradients
    return total, count, result[2] if len(result) == 3 else None


def check_pair(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must update what the ranks keep equal: trainable parameters of this model."""
    own = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_foreign = sum(id(parameter) not in own for parameter in updated)
    if num_foreign:
        raise ForeignParameters(num_foreign)
    if not any(parameter.requires_grad for parameter in updated):
        raise NoGradients
