"""One process with a process group of its own (gloo here, NCCL on a GPU) trains as one without.

The code of several ranks runs, collectives included; with one rank it has to change nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.observe.journal import read
from paceline.parallel.averaged.strategy import Averaged
from paceline.parallel.sharded.strategy import Sharded
from paceline.parallel.summed import Summed
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.world.discover.environment import World
from paceline.world.failure.flight_recorder import trail
from paceline.world.resources import DeviceChoice
from paceline.world.start import start
from tests.train.apart import WeightedTask, config

ALONE = World(0, 0, 1, 1, 0, 1, "plain", None)
WAYS: dict[str, tuple[type, dict[str, Any]]] = {
    "grad": (Summed, {}),
    "param": (Averaged, {"reduce": "param", "sync_step": 4}),
    "overlapped": (Averaged, {"reduce": "param", "sync_step": 4, "sync_overlap": 2}),
    "int8": (Averaged, {"reduce": "param", "sync_step": 4, "wire": "int8"}),
    "shards": (Sharded, {"shard": "full", "checkpoint_form": "sharded"}),
}


def losses(folder: Path, device: DeviceChoice, strategy: type | None, settings: dict[str, Any]) -> list[float]:
    threads = torch.get_num_threads()
    with start(ALONE, device=device, threads=threads, group_of_one=strategy is not None) as link:
        if strategy is not None:
            assert f"{device}:{'nccl' if device == 'cuda' else 'gloo'}" in dist.get_backend_config()
        else:
            assert not dist.is_initialized()
        trainer = open_run(WeightedTask(has_norm=True), config(epochs=3, grains=2, out=folder, **settings), link)
        assert strategy is None or isinstance(trainer.stepper.prepared.strategy, strategy)
        train(trainer)
        assert (trail.number > 0) == (strategy is not None)
    assert not dist.is_initialized()
    return [record["loss"] for record in read(folder / "metrics.jsonl") if record["kind"] == "step"]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
                pytest.mark.filterwarnings("ignore"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_group_of_one_changes_nothing(tmp_path: Path, device: DeviceChoice, way: str) -> None:
    strategy, settings = WAYS[way]
    expected = losses(tmp_path / "alone", device, None, {})
    found = losses(tmp_path / "group", device, strategy, settings)
    assert len(expected) == 18
    if device == "cpu" and way != "int8":
        assert found == expected
    assert found == pytest.approx(expected, rel=0.02 if way == "int8" else 1e-5)


def test_what_a_group_of_one_does_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses(tmp_path / "group", "cpu", *WAYS["param"])
    said = capsys.readouterr().out
    assert "weights averaged every 4 steps" in said
    assert "no effect" not in said
