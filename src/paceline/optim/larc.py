"""LARC: each tensor's gradient scaled so that its step is small beside its weights; around any optimizer.

Ginsburg, Gitman and You 2018, "Large Batch Training of Convolutional Networks with Layer-wise Adaptive Rate Control";
LARS: You, Gitman and Ginsburg 2017, arXiv 1708.03888. Two forms are in use. OpenSeq2Seq's, with the optimizer's weight
decay left to the optimizer:

    scale   r = max(eta |w| / (|g| + epsilon), min_update)
    clip    r = min(max(eta |w| / (lr (|g| + epsilon)), min_update), 1)
    g = r g

and Apex's, which has the decay d inside (`decay_inside`); the optimizer then applies none of its own:

    scale   r = eta |w| / (|g| + d |w| + epsilon)
    clip    r = min(eta |w| / (lr (|g| + d |w| + epsilon)), 1)
    g = r (g + d w)

Where |w| or |g| is 0: `freeze` goes on with the formula (r = min_update where |w| is 0), `skip` leaves g as it is. LARS
is the scale mode of the second form around SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.config.settings import OptimSettings
from paceline.core.torch_private import foreach_add_, foreach_copy_
from paceline.optim.kernels.pointers import Tables, fit, has_kernels
from paceline.optim.layerwise import (
    JoinMatrices,
    JoinNorms,
    OutOfRange,
    alike,
    by_size,
    norms,
    scale,
    unflatten,
    with_gradient,
)


@dataclass(frozen=True)
class Rule:
    """Rule by which gradients are scaled."""

    mode: Literal["clip", "scale"] = "clip"
    eta: float = 0.002
    epsilon: float = 1e-7
    min_update: float = 1e-7
    decay_inside: bool = False
    zero: Literal["freeze", "skip"] = "freeze"
    exclude_vectors: bool = False
    """Leave parameters of one dimension (biases, norms) alone; `decay_inside` adds their decay to the gradient."""

    def __post_init__(self) -> None:
        if not self.eta > 0:
            raise OutOfRange("LARC", "eta", self.eta, "above 0")
        for name in ("epsilon", "min_update"):
            if not getattr(self, name) >= 0:
                raise OutOfRange("LARC", name, getattr(self, name), "at least 0")


LARS = Rule("scale", 0.001, 1e-8, 0.0, decay_inside=True, zero="skip")


class Larc:
    """Scales the gradients of an optimizer at each of its steps; gradients must be unscaled by then.

    The optimizer stays what it is: its class, state and checkpoints know nothing of it. Nothing is read by the host.
    `fused`: None is by kernels of our own on CUDA (`has_kernels`), False by torch's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule | None = None, fused: bool | None = None) -> None:
        self.rule = rule or Rule()
        self.fused = fused
        self._join_norms: JoinNorms | None = None
        self._tables = Tables()
        self._decays: list[float] = []
        self._ratios: list[tuple[list[Tensor], Tensor, Any]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def use_shards(self, join_norms: JoinNorms, join_matrices: JoinMatrices) -> None:
        """Compute norms with this function: the parameters are pieces of tensors (`shard: full`)."""
        self._join_norms = join_norms

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def rates(self, names: Mapping[Tensor, str]) -> dict[str, float]:
        """The effective learning rate of each tensor in the last step, by name (waits for the device)."""
        by_name: dict[str, float] = {}
        for parameters, ratios, lr in self._ratios:
            values = (ratios * lr).tolist()
            by_name |= {names[parameter]: value for parameter, value in zip(parameters, values, strict=True)}
        return by_name

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._ratios = []
        self._decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            trained = with_gradient(group, "LARC", with_empty=self._join_norms is not None)
            chosen = [parameter for parameter in trained if self._is_scaled(parameter)]
            for parameters in alike(chosen):
                ratios = None
                if self._join_norms is None:
                    ratios = self._scale_fused(parameters, group["lr"], decay)
                    parameters = parameters if ratios is not None else by_size(parameters)
                if ratios is None:
                    ratios = self._scale(parameters, group["lr"], decay)
                self._ratios.append((parameters, ratios, group["lr"]))
            if self.rule.decay_inside and decay:
                rest = [parameter for parameter in trained if not self._is_scaled(parameter)]
                if rest:
                    gradients = [parameter.grad for parameter in rest if parameter.grad is not None]
                    foreach_add_(gradients, rest, alpha=decay)
                group["weight_decay"] = 0.0

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.rule.decay_inside:
            for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
                if decay:
                    group["weight_decay"] = decay

    def _is_scaled(self, parameter: Tensor) -> bool:
        return not self.rule.exclude_vectors or parameter.dim() > 1

    def _scale_fused(self, parameters: list[Tensor], lr: float | Tensor, decay: float) -> Tensor | None:
        """The ratios, by kernels of our own; None, and nothing done, where that is not possible."""
        dtype, device = parameters[0].dtype, parameters[0].device
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not has_kernels(dtype, device, self.fused) or not fit(gradients, dtype, device):
            return None
        from paceline.optim.kernels import fused
        from paceline.optim.kernels import many_tensors as kernels  # Triton may be missing where this is not reached

        table = self._tables.of([parameters, gradients], kernels.CHUNK, [dtype, dtype])
        return None if table is None else fused.larc(table, dtype, self.rule, lr, decay)

    def _scale(self, parameters: list[Tensor], lr: float | Tensor, decay: float) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        if self._join_norms is None:
            weight_norms, gradient_norms = norms(parameters, dtype), norms(gradients, dtype)
        else:
            weight_norms, gradient_norms = self._join_norms([*parameters, *gradients], dtype).chunk(2)
        ratios = self._ratio(weight_norms, gradient_norms, lr, decay)
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device)
        views = unflatten(flat, parameters)
        foreach_copy_(views, gradients)
        if self.rule.decay_inside and decay:
            pull = torch.empty_like(flat)
            foreach_copy_(unflatten(pull, parameters), parameters)
            is_pulled = (self.rule.zero == "freeze") | ((weight_norms > 0) & (gradient_norms > 0))
            scale(pull, sizes, decay * is_pulled.to(dtype))
            flat.add_(pull)
        scale(flat, sizes, ratios)
        if dtype == parameters[0].dtype and all(parameter.is_contiguous() for parameter in parameters):
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        else:
            limit = torch.finfo(parameters[0].dtype).max
            foreach_copy_(gradients, unflatten(flat.clamp_(-limit, limit), parameters))
        return ratios

    def _ratio(self, weights: Tensor, gradients: Tensor, lr: float | Tensor, decay: float) -> Tensor:
        rule = self.rule
        below = gradients + (decay * weights if rule.decay_inside else 0.0) + rule.epsilon
        ratios = rule.eta * weights / below
        if rule.mode == "clip":
            ratios = ratios / lr
        ratios = ratios.clamp_min(rule.min_update)
        if rule.mode == "clip":
            ratios = ratios.clamp_max(1.0)
        return torch.where((weights > 0) & (gradients > 0), ratios, 1.0) if rule.zero == "skip" else ratios


def rule_of(settings: OptimSettings) -> Rule | None:
    """The rule of the settings; None where gradients stay as they are."""
    excludes = settings.larc_exclude == "vectors"
    if settings.optimizer == "lars":
        return replace(LARS, eta=settings.larc_eta or LARS.eta, exclude_vectors=excludes)
    if settings.larc is None:
        return None
    return Rule(
        settings.larc,
        settings.larc_eta or Rule.eta,
        settings.larc_epsilon,
        settings.larc_min_update,
        decay_inside=settings.larc_decay == "inside",
        zero=settings.larc_zero,
        exclude_vectors=excludes,
    )


def attach(optimizer: torch.optim.Optimizer, settings: OptimSettings) -> Larc | None:
    """Attach the LARC or LARS of the settings to an optimizer; return None where gradients stay as they are."""
    rule = rule_of(settings)
    return None if rule is None else Larc(optimizer, rule)
