"""AdamW by a kernel of our own where that is faster: one pass over all weights and state.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv 1711.05101. torch's fused AdamW takes ten
launches that do not fill a GPU for a network of some hundred tensors; here it is two, whatever their number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.optim.kernels.pointers import Tables, fit, has_kernels


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with its state, its settings and its checkpoints; float32 weights are updated by our kernel.

    That is on CUDA where Triton is installed (`has_kernels`), without `amsgrad` and `maximize`; anything else goes
    torch's way. Both compute the same formula in float32, and round at other places.
    """

    is_elementwise = True
    """Each element is updated alone: `shard` may give it pieces of tensors."""
    by_kernel: bool | None = None
    """None is by our kernel on CUDA; False by torch's; True in Triton's interpreter, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tables = Tables()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("_tables", Tables())

    def _init_group(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        firsts: list[Tensor],
        seconds: list[Tensor],
        tops: list[Tensor],
        steps: list[Tensor],
    ) -> Any:
        """Collect the tensors of a group for torch's `step`, but for those that our kernel updates here."""
        collect = super()._init_group
        is_complex = collect(group, parameters, gradients, firsts, seconds, tops, steps)  # type: ignore[no-untyped-call]
        columns = [parameters, gradients, firsts, seconds, steps]
        # Pieces of no elements (`shard`) have a count of steps, which torch goes on with.
        filled = [place for place, parameter in enumerate(parameters) if parameter.numel()]
        if filled and self._update(group, [[column[place] for place in filled] for column in columns]):
            left = [place for place, parameter in enumerate(parameters) if not parameter.numel()]
            for column in columns:
                column[:] = [column[place] for place in left]
        return is_complex

    def _update(self, group: dict[str, Any], columns: list[list[Tensor]]) -> bool:
        """One step of weights and state by our kernel; False, and nothing done, where that is not possible."""
        weights, gradients, *_ = columns
        device = weights[0].device
        if any(group[name] for name in ("amsgrad", "maximize", "differentiable")):
            return False
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return False
        if not has_kernels(torch.float32, device, self.by_kernel) or not fit(gradients, torch.float32, device):
            return False
        from paceline.optim.kernels import fused, many_tensors  # Triton may be missing where this is not reached

        table = self._tables.of(columns, many_tensors.CHUNK, [torch.float32] * len(columns))
        if table is None:
            return False
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        fused.adamw(table, group, found_inf, getattr(self, "grad_scale", None))
        return True
