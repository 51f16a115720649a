"""Clipping by the norm of all gradients together; nothing is read by the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.optim.kernels.pointers import Table, Tables, fit, has_kernels


class ClipNorm:
    """Scales gradients by min(max_norm / (norm + 1e-6), 1): torch's rule, in three launches on CUDA.

    `norm` and `scale` are apart because ranks that hold pieces of the gradients add their norms up in between.
    `fused` is as for the optimizers (`has_kernels`).
    """

    def __init__(self, max_norm: float, fused: bool | None = None) -> None:
        self.max_norm = max_norm
        self.fused = fused
        self._tables = Tables()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        table = self._table(gradients)
        if table is None:
            return torch.nn.utils.get_total_norm(gradients)
        from paceline.optim.kernels import fused  # Triton may be missing where this is not reached

        return fused.norm(table, torch.float32)

    def scale(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """The gradients of the parameters, in place; `norm` is that of all of them, and stays on the device."""
        table = self._table([parameter.grad for parameter in parameters if parameter.grad is not None])
        if table is None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
            return
        from paceline.optim.kernels import fused

        fused.clip(table, torch.float32, norm, self.max_norm)

    def _table(self, gradients: Sequence[Tensor]) -> Table | None:
        if not gradients:
            return None
        first = gradients[0]
        # torch's norm of short dtypes is rounded to them; so is what a run logs of it
        if first.dtype != torch.float32 or not has_kernels(first.dtype, first.device, self.fused):
            return None
        from paceline.optim.kernels.many_tensors import CHUNK

        nonempty = [gradient for gradient in gradients if gradient.numel()]
        if not nonempty or not fit(nonempty, torch.float32, first.device):
            return None
        return self._tables.of([nonempty], CHUNK, [torch.float32])
