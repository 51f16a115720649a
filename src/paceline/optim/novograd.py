"""NovoGrad: gradients normalised tensor by tensor, then momentum.

Ginsburg et al. 2019, "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks",
arXiv 1905.11286, with the options of NeMo's implementation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.core.torch_private import foreach_copy_
from paceline.optim.kernels.pointers import Table
from paceline.optim.layerwise import Bucket, Layerwise, OutOfRange, check


class NovoGrad(Layerwise):
    """One second moment per tensor: n = |g|^2; v = n at first, then beta2 * v + (1 - beta2) * n.

    d = g / (sqrt(v) + eps) + weight_decay * w, times (1 - beta1) with `grad_averaging`; m = beta1 * m + d;
    w -= lr * m. `amsgrad` divides by the largest v so far. `luc` (layer-wise update control) takes
    min(lr, luc_trust * |w| / (|m| + luc_eps)) as the rate of a tensor.
    """

    _has_kernels = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.95, 0.25),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        amsgrad: bool = False,
        luc: bool = False,
        luc_trust: float = 1e-3,
        luc_eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        check(self, lr, betas, eps, weight_decay)
        if luc and betas[0] == 0:
            raise OutOfRange("NovoGrad", "betas[0]", 0.0, "above 0 with `luc`, which measures the momentum")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "amsgrad": amsgrad,
            "luc": luc,
            "luc_trust": luc_trust,
            "luc_eps": luc_eps,
        }
        super().__init__(params, defaults, fused)

    def _start(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        names = ["exp_avg_sq", "max_exp_avg_sq"] if group["amsgrad"] else ["exp_avg_sq"]
        return {"exp_avg": torch.zeros_like(weight), **{name: weight.new_zeros(()) for name in names}}

    def _columns(self, state: dict[str, list[Tensor]]) -> list[list[Tensor]]:
        names = ["exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq"]
        return [state[name] for name in names if name in state]

    def _launch(self, group: dict[str, Any], table: Table, dtype: torch.dtype, found_inf: Tensor) -> None:
        from paceline.optim.kernels import fused  # Triton may be missing where this is not reached

        fused.novograd(table, dtype, group, found_inf, getattr(self, "grad_scale", None))

    def _update(self, group: dict[str, Any], bucket: Bucket, gradients: list[Tensor]) -> None:
        foreach_copy_(bucket.views, gradients)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            bucket.flat.div_(grad_scale)
        second = self._second_moments(group, bucket)
        bucket.scale((second.sqrt() + group["eps"]).reciprocal())
        beta1, momenta = group["betas"][0], bucket.state["exp_avg"]
        bucket.descend(
            0.0 if group["luc"] else group["lr"],
            momenta=momenta if beta1 else [],  # not read where nothing of them is kept
            momentum=beta1,
            dampening=beta1 if group["grad_averaging"] else 0.0,
            weight_decay=group["weight_decay"],
        )
        if group["luc"]:
            trust = group["luc_trust"] * self._norms(bucket.weights) / (self._norms(momenta) + group["luc_eps"])
            foreach_copy_(bucket.views, momenta)
            bucket.scale(trust.clamp(max=group["lr"]))
            bucket.descend(1.0)
        bucket.count_step()

    def _second_moments(self, group: dict[str, Any], bucket: Bucket) -> Tensor:
        """Update the second moments; return the divisors of the views' squared gradients, one number per tensor."""
        before, now = torch.stack(bucket.state["exp_avg_sq"]), self._norms(bucket.views).square()
        beta2 = group["betas"][1]
        # 0 until a gradient was seen: the first step, and those before it whose gradient was 0.
        after = torch.where(before == 0, now, beta2 * before + (1.0 - beta2) * now)
        after = torch.where(bucket.skip > 0, before, after)
        foreach_copy_(bucket.state["exp_avg_sq"], list(after.unbind()))
        if group["amsgrad"]:
            after = torch.maximum(torch.stack(bucket.state["max_exp_avg_sq"]), after)
            foreach_copy_(bucket.state["max_exp_avg_sq"], list(after.unbind()))
        return after
