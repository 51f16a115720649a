"""Time of one update by our Triton kernels, by plain foreach calls, and by the same calls under `torch.compile`.

    python benchmarks/gpu/optimizer_kernels.py [--json] [--steps 50] [--device cpu]

NovoGrad, AdamW, LARC and clipping, for the tensors of QuartzNet 15x5 (18.9 M in 358) and of a Transformer (110 M in
149); fp32, gradients that stay as they are; milliseconds, median of 5 interleaved rounds, and the ratio to our kernels.
`done` is until the device has finished, `replayed` is the same inside a CUDA graph.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from optimizers import Clipping, make_weights, timed
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, parser, show

from paceline.optim.adamw import AdamW
from paceline.optim.larc import Larc
from paceline.optim.novograd import NovoGrad

LR, DECAY, EPS = 1e-3, 1e-3, 1e-8
WAYS = ("ours", "foreach", "compiled")


class Update:
    """A function of weights, gradients and state, called as an optimizer is."""

    def __init__(self, function: Callable[..., None], weights: list[Tensor], is_compiled: bool) -> None:
        state = [torch.zeros_like(weight) for weight in weights], [weight.new_ones(()) for weight in weights]
        self._arguments = [weight.detach() for weight in weights], [weight.grad for weight in weights], *state
        self._function = torch.compile(function, fullgraph=True) if is_compiled else function

    def step(self) -> None:
        self._function(*self._arguments)


def novograd(weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], seconds: list[Tensor]) -> None:
    squares = torch._foreach_pow(torch._foreach_norm(gradients), 2)
    torch._foreach_lerp_(seconds, squares, 0.75)
    divisors = torch._foreach_sqrt(seconds)
    torch._foreach_add_(divisors, EPS)
    updates = torch._foreach_div(gradients, divisors)
    torch._foreach_add_(updates, weights, alpha=DECAY)
    torch._foreach_mul_(momenta, 0.95)
    torch._foreach_add_(momenta, updates)
    torch._foreach_add_(weights, momenta, alpha=-LR)


def larc(weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], seconds: list[Tensor]) -> None:
    """Scale gradients by LARC, then update by SGD with momentum."""
    ratios = torch._foreach_norm(gradients)
    torch._foreach_add_(ratios, 1e-7)
    torch._foreach_reciprocal_(ratios)
    torch._foreach_mul_(ratios, torch._foreach_norm(weights))
    torch._foreach_mul_(ratios, 0.002 / LR)
    torch._foreach_clamp_max_(ratios, 1.0)
    torch._foreach_mul_(gradients, ratios)
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_add_(weights, momenta, alpha=-LR)


def clipping(weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], seconds: list[Tensor]) -> None:
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (1e-3 / (norm + 1e-6)).clamp(max=1.0))


def adamw(weights: list[Tensor], is_compiled: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(weights, lr=LR, foreach=True, capturable=weights[0].is_cuda)
    optimizer.step()  # creates the state, which the compiled step only updates
    if is_compiled:
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def transformer(device: torch.device) -> list[Tensor]:
    block = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,), *[(768,)] * 4]
    weights = [torch.randn(shape, device=device) * 0.05 for shape in [(32000, 768), *block * 12, *[(768,)] * 4]]
    for weight in weights:
        weight.requires_grad_().grad = torch.randn_like(weight) * 1e-3
    return weights


def updates(make: Callable[[torch.device], list[Tensor]], device: torch.device) -> dict[tuple[str, str], Update]:
    sgd = torch.optim.SGD(make(device), lr=LR, momentum=0.9, fused=True)
    Larc(sgd)
    made = {
        ("NovoGrad", "ours"): NovoGrad(make(device), lr=LR, weight_decay=DECAY),
        ("AdamW", "ours"): AdamW(make(device), lr=LR, fused=True, capturable=device.type == "cuda"),
        ("LARC", "ours"): sgd,
        ("clipping", "ours"): Clipping(make(device), 1e-3, by_torch=False),
    }
    for way in WAYS[1:]:
        for name, function in (("NovoGrad", novograd), ("LARC", larc), ("clipping", clipping)):
            made[name, way] = Update(function, make(device), way == "compiled")
        made["AdamW", way] = adamw(make(device), way == "compiled")
    return dict(sorted(made.items()))


def recorded(update: Update) -> Update:
    """Return an update that replays a CUDA graph of one."""
    graph, replayed = torch.cuda.CUDAGraph(), Update(clipping, [], is_compiled=False)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        update.step()
    replayed.step = graph.replay  # type: ignore[method-assign]
    return replayed


@torch.no_grad()
def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--device", default="cuda")
    options = arguments.parse_args()
    device, rows = torch.device(options.device), []
    torch._dynamo.config.recompile_limit = 64
    for network, make in (("QuartzNet", make_weights), ("Transformer", transformer)):
        made = updates(make, device)
        for metric in ("done", "replayed") if device.type == "cuda" else ("done",):
            for update in made.values():
                timed(update, 3, device)  # compiles
            runs = made if metric == "done" else {key: recorded(update) for key, update in made.items()}
            rounds = [{key: timed(run, options.steps, device)[1] for key, run in runs.items()} for _ in range(5)]
            medians = {key: statistics.median(each[key] for each in rounds) for key in runs}
            for (name, way), ms in medians.items():
                base = f"{network} {name} ours"
                rows.append(Row(f"{network} {name} {way}", metric, ms, "ms", base, ms / medians[name, "ours"]))
    show(rows, "One update", options.json)


if __name__ == "__main__":
    main()
