"""NovoGrad and LAMB in float64, tensor by tensor, written down from their formulas; and what tests of both share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
SHAPES = [(3, 4), (4,), (2, 2, 3), (5,), (1,), (4,)]


@dataclass
class NovoGradReference:
    lr: float
    betas: tuple[float, float]
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_averaging: bool = False
    amsgrad: bool = False
    luc: bool = False
    luc_trust: float = 1e-3
    luc_eps: float = 1e-8
    state: dict[int, dict[str, Any]] = field(default_factory=dict)

    def step(self, index: int, w: Array, g: Array) -> Array:
        state = self.state.setdefault(index, {"m": np.zeros_like(w), "v": None, "top": 0.0})
        n = float((g**2).sum())
        state["v"] = n if state["v"] is None else self.betas[1] * state["v"] + (1 - self.betas[1]) * n
        state["top"] = max(state["top"], state["v"])
        d = g / (np.sqrt(state["top"] if self.amsgrad else state["v"]) + self.eps)
        d = d + self.weight_decay * w
        if self.grad_averaging:
            d = d * (1 - self.betas[0])
        m = state["m"] = self.betas[0] * state["m"] + d
        rate = self.lr
        if self.luc:
            rate = min(rate, self.luc_trust * np.linalg.norm(w) / (np.linalg.norm(m) + self.luc_eps))
        return w - rate * m


@dataclass
class LambReference:
    lr: float
    betas: tuple[float, float]
    eps: float = 1e-6
    weight_decay: float = 0.0
    trust_range: tuple[float, float] | None = None
    adapt_undecayed: bool = True
    state: dict[int, dict[str, Any]] = field(default_factory=dict)

    def step(self, index: int, w: Array, g: Array) -> Array:
        state = self.state.setdefault(index, {"m": np.zeros_like(w), "v": np.zeros_like(w), "t": 0})
        state["t"] += 1
        beta1, beta2 = self.betas
        state["m"] = beta1 * state["m"] + (1 - beta1) * g
        state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
        m_hat = state["m"] / (1 - beta1 ** state["t"])
        v_hat = state["v"] / (1 - beta2 ** state["t"])
        u = m_hat / (np.sqrt(v_hat) + self.eps) + self.weight_decay * w
        norm_w, norm_u = np.linalg.norm(w), np.linalg.norm(u)
        ratio = norm_w / norm_u if norm_w > 0 and norm_u > 0 else 1.0
        if self.trust_range is not None:
            ratio = min(max(ratio, self.trust_range[0]), self.trust_range[1])
        if self.weight_decay == 0 and not self.adapt_undecayed:
            ratio = 1.0
        return w - self.lr * ratio * u


def weights(dtype: torch.dtype, device: str = "cpu", shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [weight.to(device, dtype).requires_grad_() for weight in drawn]


def gradients(step: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor | None]:
    """Of sizes from 1e-3 to 1; the last weight but one has none in odd steps."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn: list[Tensor | None] = [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** -(index % 4)).to(device, dtype)
        for index, shape in enumerate(SHAPES)
    ]
    if step % 2:
        drawn[-2] = None
    return drawn


def give(parameters: list[Tensor], found: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def in_two_groups(parameters: list[Tensor], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """The last three weights learn faster and do not decay."""
    return [
        {"params": parameters[:3], "lr": lr, "weight_decay": weight_decay},
        {"params": parameters[3:], "lr": 2 * lr, "weight_decay": 0.0},
    ]


def follow(optimizer: torch.optim.Optimizer, parameters: list[Tensor], references: list[Any], num_steps: int) -> float:
    """Train both on the same gradients; the largest difference between their weights, relative to 1."""
    expected = [parameter.detach().double().numpy().copy() for parameter in parameters]
    for step in range(num_steps):
        found = gradients(step, parameters[0].dtype)
        give(parameters, found)
        optimizer.step()
        for index, gradient in enumerate(found):
            if gradient is not None:
                reference = references[index >= 3]
                expected[index] = reference.step(index, expected[index], gradient.double().numpy())
    pairs = zip(parameters, expected, strict=True)
    return max(float(np.abs(own.detach().double().numpy() - wanted).max()) for own, wanted in pairs)


def snapshot(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[bytes]:
    """Every bit of the weights and of the state."""
    state = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in [*parameters, *state]]
