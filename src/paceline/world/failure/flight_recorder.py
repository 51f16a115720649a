"""Flight recorder of a rank: phase, step and last collective, so that others can report it when the rank cannot.

The main thread only sets attributes; a thread that looks once a second puts them into words.
"""

from __future__ import annotations

from typing import Final, Literal

import torch

Doing = Literal["starting", "training", "training from CUDA graphs", "validating", "saving"]
SAVING: Final = "saving"


class Trail:
    """The place of this process. There is one, `trail`: a process is one rank of one job at a time."""

    __slots__ = ("doing", "dtype", "name", "number", "numel", "step")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new job: all ranks count its collectives from here on."""
        self.doing: Doing = "starting"
        self.step = -1
        """Counts from 0 as in `metrics.jsonl`; -1 before the first."""
        self.number = 0
        """Collectives so far."""
        self.name, self.numel = "", 0
        self.dtype: torch.dtype | None = None

    def note(self, name: str, tensor: torch.Tensor | None = None) -> None:
        """Record the start of a collective. All ranks call it in the same order."""
        self.number += 1
        self.name = name
        if tensor is None:
            self.dtype = None
        else:
            self.numel, self.dtype = tensor.numel(), tensor.dtype

    def __str__(self) -> str:
        step = "before the first step" if self.step < 0 else f"step {self.step}"
        if not self.number:
            return f"{self.doing}, {step}, no collective yet"
        size = "" if self.dtype is None else f" of {self.numel} {str(self.dtype).removeprefix('torch.')}"
        return f"{self.doing}, {step}, collective {self.number} ({self.name}{size})"


trail = Trail()
