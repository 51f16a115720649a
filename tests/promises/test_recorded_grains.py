"""Recorded grains on ranks: the losses and weights of plain ones, however the ranks come to one model.

On the CPU with a recorder that replays by running again, without the model's hooks; on a GPU with CUDA graphs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.config.settings import EngineConfig
from paceline.data.grain import Batch, Grain
from paceline.optim.larc import Larc
from paceline.parallel import summed
from paceline.speed.graphs import CudaRecorder, Recorder
from paceline.train.engine import Engine
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import ranks, run_ranks
from tests.speed.test_graphs import Again

NUM_SAMPLES, BATCH = 51, 16  # the last step of an epoch has 3: with 4 grains another shape, and a rank without one
ALONE = World(0, 0, 1, 1, 0, 1, "test", None)
WAYS: dict[str, dict[str, Any]] = {
    "grad": {},
    "fast": {"sums": "fast"},
    "half": {"wire": "bf16"},
    "ema": {"ema": 0.9, "clip_norm": 0.1},
    "larc": {"clip_value": 0.05},
    "param": {"reduce": "param", "sync_step": 2, "ema": 0.9},
    "overlapped": {"reduce": "param", "sync_step": 2, "sync_overlap": 1},
}
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


class Net(nn.Module):
    """Two buckets, batch norm, dropout, and a parameter that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        widths = pairwise([6, 24, 24, 24, 1])
        self.layers = nn.ModuleList(nn.Conv1d(before, after, 1) for before, after in widths)
        self.norm, self.dropout = nn.BatchNorm1d(24), nn.Dropout(0.2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:  # (batch, 6, 3) -> (batch, 3)
        for layer in self.layers[:-1]:
            x = torch.tanh(self.norm(layer(x)))
        return self.layers[-1](self.dropout(x)).squeeze(1)


SMALL_BUCKET = 2000
"""Bytes, of the first bucket: more than one layer's."""


def points() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 6, 3, generator=random)
    return TensorDataset(x, x.sum(1).sin())


def train(link: Link, recorder: Recorder | None, way: str, grains: int) -> tuple[list[float], dict[str, Tensor]]:
    """Two epochs; the losses of all ranks, where they are together in every step, and the weights."""
    settings = dict(WAYS[way])
    engine = Engine(EngineConfig(level=0, seed=5, **settings), link=link)
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9, weight_decay=0.01)
    if way == "larc":
        Larc(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summed, "FIRST_BUCKET_BYTES", SMALL_BUCKET)
        engine.prepare(net, optimizer)
    if isinstance(recorder, Again):
        recorder.parameters = list(net.parameters())
    if recorder is not None:
        engine.record(recorder, lambda grain: grain.data)

    def loss(grain: Grain) -> Any:
        return (net(grain.x) - grain.y).square().sum(), len(grain)

    losses = []
    data = engine.batches(points(), epochs=2, global_batch=BATCH, grains=grains, workers=0)
    for batch in data:
        step = engine.step(loss, batch)
        losses.append(float(step.loss_sum))
    engine.sync()
    if recorder is not None:
        assert engine.recorded is not None
        graphs = engine.recorded.graphs
        assert not graphs.failures
        assert graphs.num_replayed > graphs.num_plain
    with engine.whole_statistics():
        weights = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}
    engine.release()
    return losses, weights


def check(link: Link, recorder: Recorder, way: str, grains: int, *, is_exact: bool = True) -> None:
    """Recorded against plain, on the same ranks."""
    expected, found = train(link, None, way, grains), train(link, recorder, way, grains)
    if is_exact:
        assert found[0] == expected[0]
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0 if is_exact else 1e-4, atol=0 if is_exact else 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_group_of_one(way: str) -> None:
    with start(ALONE, device="cpu", threads=1, group_of_one=True) as link:
        check(link, Again(), way, grains=2)


def test_alone_in_tree() -> None:
    """Eight grains on one rank: sums are put aside, and replays go on adding to the same memory."""
    with start(ALONE, device="cpu", threads=1) as link:
        check(link, Again(), "ema", grains=8)


@ranks(2, 4)
def test_ranks(link: Link) -> None:
    """Four grains on two ranks: only the last of each sends. On four, one has none in the last step of an epoch."""
    for way in ("grad", "fast", "half", "overlapped") if link.world.size == 2 else ("ema", "larc", "param"):
        check(link, Again(), way, grains=4)


def test_buckets_are_sent_while_a_replay_runs() -> None:
    """All but the last one, which carries the tally; only in the last grain of a step."""
    recorder = Again()
    with start(ALONE, device="cpu", threads=1, group_of_one=True) as link:
        train(link, recorder, "grad", grains=2)
    # The first of two buckets, in each of 8 steps but that whose last grain has a shape for the first time.
    assert recorder.done.count("waited") == 7


@pytest.mark.parametrize("way", [pytest.param(way, marks=gpu) for way in WAYS])
def test_a_group_of_one_with_cuda_graphs(way: str) -> None:
    """NCCL; a bucket is sent from a stream of its own beside the replay."""
    with start(ALONE, device="cuda", threads=1, group_of_one=True) as link:
        check(link, CudaRecorder(link.device), way, grains=2, is_exact=False)


@pytest.mark.parametrize("way", [pytest.param(way, marks=gpu) for way in ("grad", "half", "ema")])
def test_no_device_sync_in_a_recorded_step(way: str) -> None:
    """A replay does not wait for the device, and what follows it is launched meanwhile."""
    with start(ALONE, device="cuda", threads=1, group_of_one=True) as link:
        engine = Engine(EngineConfig(level=2, seed=5, **WAYS[way]), link=link)
        net = Net()
        net.unused.requires_grad_(False)  # that ranks use different parts is learned from the device
        engine.prepare(net, torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9, fused=True))
        engine.record(CudaRecorder(link.device), lambda grain: grain.data)
        data = [tensor.cuda() for tensor in points().tensors]
        grains = [Grain((data[0][at : at + 8], data[1][at : at + 8]), at // 8, np.arange(at, at + 8)) for at in (0, 8)]
        batch = Batch(0, 0, 2, 16, 16, grains, own_count=16)
        try:
            for number in range(8):
                if number == 3:
                    torch.cuda.set_sync_debug_mode("error")
                engine.step(lambda grain: ((net(grain.x) - grain.y).square().sum(), len(grain)), batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.recorded is not None
        assert engine.recorded.graphs.num_replayed == 15


def on_shared_gpu(link: Link, way: str) -> list[float]:
    """Leave the pool's group for one of ranks that share the GPU; the losses of recorded grains."""
    link.close()
    with start(link.world, device="cuda", threads=1, share_devices=True) as shared:
        assert "cuda:gloo" in dist.get_backend_config()
        losses, _ = train(shared, CudaRecorder(shared.device), way, grains=4)
    return losses


@pytest.mark.parametrize("way", [pytest.param(way, marks=gpu) for way in ("grad", "ema", "larc")])
@pytest.mark.parametrize("size", [pytest.param(2, marks=gpu), pytest.param(4, marks=gpu)])
def test_ranks_that_share_a_gpu(size: int, way: str) -> None:
    """Their losses are those of one rank without graphs."""
    with start(ALONE, device="cuda", threads=1) as link:
        expected, _ = train(link, None, way, grains=4)
    for losses in run_ranks(size, on_shared_gpu, way, timeout_s=120.0):
        assert losses == pytest.approx(expected, rel=1e-4)
