"""Each kernel of a separable sub-block against its floor and against the library, on one GPU.

    python benchmarks/gpu/kernels.py [--json] [--batch 64]

One sub-block of QuartzNet 15x5 per line of shapes: 836 frames, lengths 70 to 100 %. Microseconds per call, from CUDA
graphs that alternate between two sets of data. The floor is the larger of bytes / 4.3 TB/s (what a copy was measured to
do on an H200) and operations / 788 TFLOP/s (a large product); bytes of frames behind an utterance's length count,
though the kernels skip them. `cudnn` is the depthwise convolution alone, without batch norm, ReLU and masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, parser, show

from paceline.recipes.speech.kernels.quartznet import depthwise, norm, reference
from paceline.recipes.speech.kernels.quartznet import product as products
from paceline.recipes.speech.kernels.tiles import padded_frames
from paceline.speed.layers.kernels.ways import Ways, using

FRAMES = 836
SHAPES = [(256, 33), (256, 39), (512, 51), (512, 63), (512, 75)]
BYTES_PER_US, FLOP_PER_US = 4.3e6, 788e6


class Data:
    """What one sub-block has in hand during a step."""

    def __init__(self, channels: int, kernel: int, batch: int, seed: int) -> None:
        dice = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=dice)

        row = padded_frames(FRAMES)
        self.lengths = (FRAMES * (0.7 + 0.3 * torch.rand(batch, device="cuda", generator=dice))).int()
        held = reference.held(self.lengths, row)
        self.tiles = products.list_tiles(self.lengths, row)
        self.y, self.h, self.g = ((draw(channels, batch, row) * held).bfloat16() for _ in range(3))
        self.affine, self.moments, self.sums = draw(2, channels), draw(3, channels), draw(2, channels)
        self.filters, self.matrix = draw(channels, 1, kernel), draw(channels, channels).bfloat16()
        self.plain = draw(batch, channels, FRAMES).bfloat16().requires_grad_()
        self.plain_filters = self.filters.bfloat16().requires_grad_()


def kernels(data: Data) -> dict[str, tuple[Callable[[Data], object], float, float]]:
    """Name -> what to run, passes over an activation, operations."""
    channels, batch, row = data.y.shape
    product = 2.0 * channels * channels * batch * row
    ones = torch.ones(channels, device="cuda")
    return {
        "depthwise forward, not fetched": (
            with_ways(Ways(), lambda d: depthwise.forward(d.y, d.affine, d.lengths, d.lengths, d.filters, row, 1, 1)),
            2,
            0,
        ),
        "depthwise forward": (
            lambda d: depthwise.forward(d.y, d.affine, d.lengths, d.lengths, d.filters, row, 1, 1),
            2,
            0,
        ),
        "depthwise backward": (
            lambda d: depthwise.backward(
                d.g, d.y, d.affine, d.moments, None, d.lengths, d.lengths, d.filters, 1, 1, needs_data=True
            ),
            3,
            0,
        ),
        "cudnn forward": (lambda d: convolved(d), 2, 0),
        "cudnn backward": (lambda d: torch.autograd.grad(convolved(d), (d.plain, d.plain_filters), d.plain), 5, 0),
        "pointwise forward": (lambda d: torch.mm(d.matrix, d.y.flatten(1)), 2, product),
        "pointwise data gradient": (lambda d: torch.mm(d.matrix.t(), d.g.flatten(1)), 2, product),
        "pointwise weight gradient": (
            lambda d: torch.mm(d.g.flatten(1), d.y.flatten(1).t(), out_dtype=torch.float32),
            2,
            product,
        ),
        "pointwise forward and statistics": (
            lambda d: norm.statistics(
                torch.mm(d.matrix, d.y.flatten(1)).view_as(d.y), d.lengths, FRAMES, ones, ones, 1e-3
            ),
            3,
            product,
        ),
        "pointwise forward, listed": (
            lambda d: products.forward(d.matrix, d.y, d.tiles, FRAMES, ones, ones, 1e-3),
            2,
            product,
        ),
        "pointwise data gradient, listed": (lambda d: products.data_gradient(d.matrix, d.g, d.tiles), 2, product),
        "pointwise weight gradient, listed": (lambda d: products.weight_gradient(d.g, d.y, d.tiles), 2, product),
        "batch statistics": (lambda d: norm.statistics(d.y, d.lengths, FRAMES, ones, ones, 1e-3), 1, 0),
        "batch statistics, not flat": (
            with_ways(Ways(), lambda d: norm.statistics(d.y, d.lengths, FRAMES, ones, ones, 1e-3)),
            1,
            0,
        ),
        "batch norm backward": (
            lambda d: norm.apply_backward(d.h, d.sums, d.y, d.affine, d.moments, d.lengths, FRAMES),
            3,
            0,
        ),
        "join": (lambda d: norm.join(d.y, d.affine, d.h, d.affine, d.lengths), 3, 0),
        "join backward": (
            lambda d: norm.join_backward(d.g, d.y, d.affine, d.moments, d.h, d.affine, d.moments, d.lengths),
            4,
            0,
        ),
    }


def with_ways(ways: Ways, run: Callable[[Data], object]) -> Callable[[Data], object]:
    def with_them(data: Data) -> object:
        with using(ways):
            return run(data)

    return with_them


def convolved(data: Data) -> Tensor:
    kernel = data.filters.shape[-1]
    return F.conv1d(data.plain, data.plain_filters, padding=kernel // 2, groups=data.plain.shape[1])


def microseconds(run: Callable[[Data], object], sets: list[Data], repeats: int = 5) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for data in sets:
            run(data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for data in sets:
            run(data)
    graph.replay()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(repeats):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * began.elapsed_time(ended) / repeats / len(sets)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--batch", type=int, default=64)
    options = arguments.parse_args()
    rows = []
    for channels, kernel in SHAPES:
        sets = [Data(channels, kernel, options.batch, seed) for seed in range(2)]
        one_pass = sets[0].y.numel() * 2
        for name, (run, passes, operations) in kernels(sets[0]).items():
            spent = microseconds(run, sets)
            floor = max(passes * one_pass / BYTES_PER_US, operations / FLOP_PER_US)
            case = f"{channels} channels, kernel {kernel}"
            rows.append(Row(case, name, spent, "us", f"floor {floor:.1f} us", spent / floor))
        del sets
        torch.cuda.empty_cache()
    show(rows, f"kernels of a separable sub-block, batch {options.batch}", options.json)


if __name__ == "__main__":
    main()
