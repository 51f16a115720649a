"""On a real GPU: the clock's events cost no wait, and say where the device's time went."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.config.settings import TrainConfig
from paceline.observe.device_clock import DeviceClock
from paceline.observe.journal import read
from paceline.train.engine import Engine
from paceline.train.loop import train
from paceline.train.meter import make_clock
from paceline.train.run import open_run
from tests.promises.test_gpu import Blobs, gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch says of its own sync debug mode that it is a prototype
]


def test_sampling_waits_for_nothing() -> None:
    clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True), every=2)
    engine = Engine(link=gpu(), clock=clock, level=2)
    model = Blobs().model().cuda()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, fused=True))
    task = Blobs()
    clock.begin_epoch()
    try:
        for batch in engine.batches(task.train_data(), global_batch=64, grains=2, epochs=2, workers=0):
            torch.cuda.set_sync_debug_mode("error" if engine.num_steps >= 4 else "default")
            clock.begin_step()
            engine.step(lambda grain: task.loss(model, grain), batch)
            clock.lap("compute")
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    clock.collect()
    assert clock.device.num_steps >= 6
    assert min(clock.device.seconds["compute"], clock.device.seconds["optimizer"]) > 0


class Busy(Blobs):
    """One large product, so that its device time is known from the outside."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 4))


def test_the_record_of_an_epoch_is_of_the_device(tmp_path: Path) -> None:
    assert isinstance(make_clock(torch.device("cuda")), DeviceClock)
    config = TrainConfig(global_batch=64, epochs=12, level=0, optimizer="sgd", lr=0.001, out=tmp_path / "run")
    train(open_run(Busy(), config, gpu()))
    shares = []
    for record in read(tmp_path / "run" / "metrics.jsonl", "epoch"):
        device, (seconds,), (memory,) = record["device"], record["seconds"], record["memory"]
        assert device["name"] == torch.cuda.get_device_name()
        assert device["sampled_steps"] == 1, "of eight"
        shares.append((seconds["compute"] + seconds["optimizer"]) / sum(seconds.values()))
        assert memory["device_bytes"] > 4 * 8192 * 8192
    assert statistics.median(shares) > 0.5, "of milliseconds: a single epoch may have had no core"
