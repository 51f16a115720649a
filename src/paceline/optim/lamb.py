"""LAMB: Adam whose step is as long, tensor by tensor, as the weights are large; for very large batches.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.core.torch_private import foreach_add_, fused_adam_
from paceline.optim.layerwise import Bucket, Layerwise, OutOfRange, check


class Lamb(Layerwise):
    """u = m_hat / (sqrt(v_hat) + eps) + weight_decay * w; w -= lr * ratio * u with ratio = |w| / |u| of each tensor.

    m_hat and v_hat are Adam's moments with bias correction. The ratio is 1 where either norm is 0, and is kept within
    `trust_range` where that is given. `adapt_undecayed=False` leaves it at 1 in groups without weight decay (biases
    and norms, by custom).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        trust_range: tuple[float, float] | None = None,
        adapt_undecayed: bool = True,
    ) -> None:
        check(self, lr, betas, eps, weight_decay)
        if trust_range is not None and not 0.0 <= trust_range[0] <= trust_range[1]:
            raise OutOfRange("Lamb", "trust_range", trust_range, "(lowest, highest), both at least 0")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_range": trust_range,
            "adapt_undecayed": adapt_undecayed,
        }
        super().__init__(params, defaults)

    def _start(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _update(self, group: dict[str, Any], bucket: Bucket, gradients: list[Tensor]) -> None:
        weights, updates, weight_decay = bucket.weights, bucket.views, group["weight_decay"]
        bucket.count_step()
        bucket.flat.zero_()
        gradients = [gradient.to(bucket.flat.dtype).contiguous() for gradient in gradients]
        means, squares, steps = (bucket.state[name] for name in ("exp_avg", "exp_avg_sq", "step"))

        def update(columns: list[list[Tensor]], positions: list[int]) -> None:
            fused_adam_(
                *columns,
                [],
                [steps[position] for position in positions],
                lr=-1.0,  # from 0 with this rate, what Adam arrives at is its update
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=0.0,
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=bucket.skip,
            )

        bucket.update([updates, gradients, means, squares], update)
        if weight_decay:
            foreach_add_(updates, weights, alpha=weight_decay)
        if weight_decay or group["adapt_undecayed"]:
            bucket.scale(self._ratios(group, self._norms(weights), self._norms(updates)))
        bucket.descend(group["lr"])

    def _ratios(self, group: dict[str, Any], weights: Tensor, updates: Tensor) -> Tensor:
        """Return the trust ratio of each update, from the norms of weights and updates."""
        ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
        return ratios if group["trust_range"] is None else ratios.clamp(*group["trust_range"])
