"""What a training step says of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Step:
    """What a step did. Tensors stay on the device until somebody reads `loss`."""

    number: int
    loss_sum: torch.Tensor
    count: Any
    ranks_with_data: Any = None
    ranks_to_stop: Any = None
    gradient_norm: torch.Tensor | None = None
    outputs: list[Any] = field(default_factory=list)
    is_local: bool = False
    """With `reduce: param`, until the next average: loss and count are this rank's."""
    notes: dict[str, float] = field(default_factory=dict)
    """More numbers for whoever logs."""

    @property
    def loss(self) -> float:
        """Loss per counted item over all ranks, or of this rank while `is_local` (waits for the device)."""
        return float(self.loss_sum) / float(self.count) if self.count else math.nan
