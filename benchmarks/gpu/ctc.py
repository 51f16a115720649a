"""What the loss of CTC costs, forward and backward: our kernels beside torch's, in float32 and in float64.

    python benchmarks/gpu/ctc.py [--json] [--frames 835] [--labels 250] [--batches 64,256]

29 classes, lengths of 70 to 100 %, log-probabilities on the device; milliseconds, median of 7 interleaved rounds, until
the device is done. `error` is the largest difference of a gradient from torch's in float64 on the CPU, of 4 utterances.
`replayed` is our time inside a CUDA graph; torch's cannot be in one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, parser, show

from paceline.recipes.speech.text.ctc import ctc_loss_sum, is_by_kernel

CLASSES = 29
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def make(batch: int, num_frames: int, num_labels: int) -> Batch:
    dice = torch.Generator().manual_seed(0)
    log_probs = torch.randn(batch, num_frames, CLASSES, generator=dice).mul_(3).log_softmax(-1)
    targets = torch.randint(0, CLASSES - 1, (batch, num_labels), generator=dice)
    share = 0.7 + 0.3 * torch.rand(batch, generator=dice)
    return log_probs, targets, (share * num_frames).long(), (share * num_labels).long()


def by_torch(dtype: torch.dtype, batch: Batch) -> Tensor:
    """Lengths on the host, as torch wants them."""
    log_probs, targets, frames, labels = batch
    leaf = log_probs.detach().requires_grad_()
    loss = F.ctc_loss(leaf.to(dtype).transpose(0, 1), targets, frames, labels, CLASSES - 1, "sum", zero_infinity=True)
    return torch.autograd.grad(loss, leaf)[0]


def by_kernel(batch: Batch) -> Tensor:
    leaf = batch[0].detach().requires_grad_()
    return torch.autograd.grad(ctc_loss_sum(leaf, *batch[1:]), leaf)[0]


def timed(run: Callable[[], object], num_runs: int = 10) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_runs):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_runs * 1e3


def captured(run: Callable[[], object]) -> Callable[[], object]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--frames", type=int, default=835)
    arguments.add_argument("--labels", type=int, default=250)
    arguments.add_argument("--batches", default="64,256")
    options = arguments.parse_args()
    rows = []
    for batch in map(int, options.batches.split(",")):
        host = make(batch, options.frames, options.labels)
        device: Batch = (host[0].cuda(), host[1].cuda(), host[2].cuda(), host[3].cuda())
        for_torch: Batch = (device[0], device[1], host[2], host[3])
        assert is_by_kernel(device[0])
        ways: dict[str, Callable[[], Tensor]] = {
            "torch, float64": partial(by_torch, torch.float64, for_torch),
            "torch, float32": partial(by_torch, torch.float32, for_torch),
            "Paceline": partial(by_kernel, device),
        }
        few: Batch = (host[0][:4], host[1][:4], host[2][:4], host[3][:4])
        exact = by_torch(torch.float64, (few[0].double(), *few[1:]))
        for name, way in ways.items():
            error = float((way()[:4].cpu() - exact).abs().max())
            rows.append(Row(f"{name}, batch {batch}", "error", error, ""))
        runs: dict[str, Callable[[], object]] = {**ways, "Paceline, replayed": captured(ways["Paceline"])}
        rounds = [{name: timed(run) for name, run in runs.items()} for _ in range(7)]
        medians = {name: statistics.median(each[name] for each in rounds) for name in runs}
        base = "torch, float64"
        rows += [
            Row(f"{name}, batch {batch}", "time", value, "ms", base, value / medians[base])
            for name, value in medians.items()
        ]
    show(rows, "CTC, forward and backward", options.json)


if __name__ == "__main__":
    main()
