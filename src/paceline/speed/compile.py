"""What `compile_mode` means to torch."""

from __future__ import annotations

import torch

# Without CUDA graphs: they reuse the memory of outputs, which a step keeps until its last grain is done.
MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def compile_in_place(model: torch.nn.Module, mode: str) -> None:
    """Compile a model's forward; the model keeps its class and its names."""
    model.compile(mode=MODES[mode])
