"""What one update of NovoGrad, LAMB, LARC and clipping costs, beside torch's AdamW, torch's foreach kernels and the
same written tensor by tensor.

    python benchmarks/gpu/optimizers.py [--json] [--steps 50] [--device cpu]

Weights in the number and sizes of QuartzNet 15x5 (18.9 M in 358 tensors), fp32, gradients that stay as they are;
milliseconds per update, median of 5 interleaved rounds. `issue` is until the host is free again, `done` until the
device is, `replayed` until it is inside a CUDA graph, where nothing is issued.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, parser, show

from paceline.optim.clip import ClipNorm
from paceline.optim.lamb import Lamb
from paceline.optim.larc import Larc, Rule
from paceline.optim.novograd import NovoGrad


class TensorByTensor(torch.optim.Optimizer):
    """NovoGrad's formulas as one would write them down: a dozen small kernels per tensor, first step by the host."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state, squared = self.state[weight], weight.grad.square().sum()
                if not state:
                    state["m"], state["v"] = torch.zeros_like(weight), squared
                else:
                    state["v"].mul_(0.25).add_(squared, alpha=0.75)
                state["m"].mul_(0.95).add_(weight.grad / (state["v"].sqrt() + 1e-8)).add_(weight, alpha=1e-3)
                weight.add_(state["m"], alpha=-group["lr"])


class LarcByTensor:
    """LARC as Apex writes it: a few kernels per tensor, and the host asks for both norms."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._scale)

    @staticmethod
    @torch.no_grad()
    def _scale(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                size, steep = weight.norm(), weight.grad.norm()
                if size != 0 and steep != 0:
                    local = 0.02 * size / (steep + 1e-8)
                    weight.grad.mul_(min(local / group["lr"], 1))


class Clipping(torch.optim.Optimizer):
    """Nothing but clipping, as an update."""

    def __init__(self, params: list[Tensor], max_norm: float, by_torch: bool) -> None:
        super().__init__(params, {"lr": 0.0})
        self._max_norm, self._by_torch, self._clip = max_norm, by_torch, ClipNorm(max_norm)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        weights = self.param_groups[0]["params"]
        if self._by_torch:
            torch.nn.utils.clip_grad_norm_(weights, self._max_norm)
        else:
            self._clip.scale(weights, self._clip.norm([weight.grad for weight in weights]))


def sgd(device: torch.device) -> torch.optim.SGD:
    return torch.optim.SGD(make_weights(device), lr=1e-3, momentum=0.9, fused=True)


def make_weights(device: torch.device) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(64, 1, 33), (256, 64, 1), (256,), (256,)]
    channels = 256
    for width, kernel in [(256, 33), (256, 39), (512, 51), (512, 63), (512, 75)]:
        for _block in range(3):
            first = channels
            for _repeat in range(5):
                shapes += [(channels, 1, kernel), (width, channels, 1), (width,), (width,)]
                channels = width
            shapes += [(width, first, 1), (width,), (width,)]
    shapes += [(512, 1, 87), (512, 512, 1), (512,), (512,), (1024, 512, 1), (1024,), (1024,), (29, 1024, 1), (29,)]
    weights = [torch.randn(shape, device=device).mul_(0.05).requires_grad_() for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e-3
    return weights


def replayed(optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizer.step()
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_steps):
            graph.replay()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - began) / num_steps * 1e3)
    return statistics.median(rounds)


def timed(optimizer: torch.optim.Optimizer, num_steps: int, device: torch.device) -> tuple[float, float]:
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    for _ in range(num_steps):
        optimizer.step()
    issued = time.perf_counter()
    wait()
    return (issued - began) / num_steps * 1e3, (time.perf_counter() - began) / num_steps * 1e3


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--device", default="cuda")
    options = arguments.parse_args()
    device = torch.device(options.device)
    optimizers = {
        "torch AdamW, fused": torch.optim.AdamW(make_weights(device), lr=1e-3, fused=True),
        "NovoGrad, tensor by tensor": TensorByTensor(make_weights(device), lr=1e-3),
        "NovoGrad, foreach": NovoGrad(make_weights(device), lr=1e-3, weight_decay=1e-3, fused=False),
        "NovoGrad": NovoGrad(make_weights(device), lr=1e-3, weight_decay=1e-3),
        "Lamb": Lamb(make_weights(device), lr=1e-3, weight_decay=1e-3),
    }
    optimizers["SGD"] = sgd(device)
    optimizers["SGD with LARC, foreach"] = sgd(device)
    Larc(optimizers["SGD with LARC, foreach"], fused=False)
    optimizers["SGD with LARC"] = sgd(device)
    Larc(optimizers["SGD with LARC"])
    optimizers["SGD with LARC, decay inside"] = sgd(device)
    Larc(optimizers["SGD with LARC, decay inside"], Rule(decay_inside=True, zero="skip"))
    optimizers["SGD with LARC, tensor by tensor"] = sgd(device)
    LarcByTensor(optimizers["SGD with LARC, tensor by tensor"])
    optimizers["NovoGrad with LARC"] = NovoGrad(make_weights(device), lr=1e-3, weight_decay=1e-3)
    Larc(optimizers["NovoGrad with LARC"])
    optimizers["clipping, torch"] = Clipping(make_weights(device), 1e-3, by_torch=True)
    optimizers["clipping"] = Clipping(make_weights(device), 1e-3, by_torch=False)
    for optimizer in optimizers.values():
        timed(optimizer, 3, device)
    rounds = [{name: timed(each, options.steps, device) for name, each in optimizers.items()} for _ in range(5)]
    rows, base = [], "torch AdamW, fused"
    for index, metric in enumerate(("issue", "done")):
        medians = {name: statistics.median(each[name][index] for each in rounds) for name in optimizers}
        rows += [Row(name, metric, value, "ms", base, value / medians[base]) for name, value in medians.items()]
    if device.type == "cuda":
        for name in ("NovoGrad", "SGD", "SGD with LARC", "NovoGrad with LARC", "clipping"):
            rows.append(Row(name, "replayed", replayed(optimizers[name], options.steps), "ms"))
    show(sorted(rows, key=lambda row: list(optimizers).index(row.case)), "One update", options.json)


if __name__ == "__main__":
    main()
