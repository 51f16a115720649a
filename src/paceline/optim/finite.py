"""Search for inf and nan in all gradients together; nothing is read by the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.optim.kernels.pointers import Tables, fit, has_kernels


class FiniteCheck:
    """Looks at float32 gradients in one launch on CUDA, which reads them and writes nothing.

    torch's check, made for loss scales, writes all gradients anew. `fused` is as for the optimizers (`has_kernels`).
    """

    def __init__(self, fused: bool | None = None) -> None:
        self.fused = fused
        self._tables = Tables()

    def find_inf(self, gradients: Sequence[Tensor], found_inf: Tensor) -> bool:
        """Set `found_inf` to 1 if a gradient is not finite; False, and nothing done, where no kernel is for them."""
        filled = [gradient for gradient in gradients if gradient.numel()]
        if not filled or not has_kernels(torch.float32, filled[0].device, self.fused):
            return False
        if not fit(filled, torch.float32, filled[0].device):
            return False
        from paceline.optim.kernels import fused, many_tensors  # Triton may be missing where this is not reached

        table = self._tables.of([filled], many_tensors.CHUNK, [torch.float32])
        if table is None:
            return False
        fused.find_inf(table, torch.float32, found_inf)
        return True
