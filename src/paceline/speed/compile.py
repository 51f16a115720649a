"""`torch.compile` as `compile_mode` asks for it, and what it has cost so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.core.torch_private import compile_counters

# Without CUDA graphs: they reuse the memory of outputs, which a step keeps until its last grain is done.
MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def compile_in_place(model: torch.nn.Module, mode: str) -> None:
    """Compile a model's forward; the model keeps its class and its names."""
    model.compile(mode=MODES[mode])


@dataclass(frozen=True)
class Compiled:
    """Cost of compiling, since the process began or between two readings."""

    recompiles: int = 0
    """Times that code was compiled for other shapes or values than before; the first time of each is none."""
    seconds: float = 0.0

    def since(self, earlier: Compiled) -> Compiled:
        return Compiled(self.recompiles - earlier.recompiles, self.seconds - earlier.seconds)


def compiled_so_far() -> Compiled:
    """Return what this process has compiled again, and the seconds that all compiling took."""
    counters = compile_counters()
    return Compiled(counters.recompiles, counters.seconds)
