"""Shards on a GPU: a group of one rank through NCCL, and ranks that share the GPU through gloo."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.observe.journal import read
from paceline.parallel.sharded.strategy import Sharded
from paceline.speed.autotune.candidates import Candidate
from paceline.train import loop
from paceline.train.autotune import autotuner
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import run_ranks
from tests.train.sharded import BlocksTask, opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of torch about its own compiler
]
ALONE = World(0, 0, 1, 1, 0, 1, "plain", None)
ALL, FIRST_EPOCH = 12, 3
WAYS: dict[str, tuple[dict[str, Any], float, int]] = {
    "-O0": ({"level": 0}, 1e-4, ALL),
    "-O3": ({"level": 3}, 0.05, FIRST_EPOCH),
    "-O4": ({"level": 4}, 0.05, FIRST_EPOCH),
    "bf16 on the wire": ({"level": 0, "wire": "bf16"}, 0.05, ALL),
    "fp16 masters": ({"precision": "fp16-master"}, 0.05, ALL),
    "fp16 masters, -O3": ({"precision": "fp16-master", "level": 3}, 0.05, FIRST_EPOCH),
    "joined norms": ({"level": 0, "sync_batchnorm": "all", "grains": 4}, 1e-4, ALL),
}
"""Settings, how far their losses may be from those of a whole model, and for how many steps.

A block that is compiled alone rounds to 16 bits elsewhere than a whole model does, and batch norm over the two samples
of a grain makes much of that within an epoch: whether blocks are right over many steps is seen at `-O0`.
"""


def assert_near(cut: list[float], whole: list[float], way: str) -> None:
    _, bound, number = WAYS[way]
    assert len(cut) == len(whole) == ALL
    assert cut[:number] == pytest.approx(whole[:number], rel=bound)


def train(link: Link, way: str, shard: str, folder: str) -> list[float]:
    settings, *_ = WAYS[way]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("XDG_CACHE_HOME", f"{folder}-cache")
        # A contest takes a minute; what it chooses is not the matter here.
        patch.setattr(autotuner, "candidates", lambda *_, **__: [Candidate(3)])
        made = opened(link, BlocksTask(has_norm=True), {**settings, "shard": shard, "out": folder, "log_every": 1})
        loop.train(made)
    assert isinstance(made.stepper.prepared.strategy, Sharded) == (shard != "none")
    assert made.stepper.precision.compile == (settings.get("level") in (3, 4))
    return [row["loss"] for row in read(Path(folder) / "metrics.jsonl") if "loss" in row and "step" in row]


def on_shared_gpu(link: Link, way: str, shard: str, folder: str) -> list[float]:
    """Leave the pool's group for one of ranks that share the GPU."""
    link.close()
    with start(link.world, device="cuda", threads=1, share_devices=True) as shared:
        return train(shared, way, shard, folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_group_of_one(way: str, tmp_path: Path) -> None:
    if way == "joined norms":
        pytest.skip("one grain for each of four ranks")
    with start(ALONE, device="cuda", threads=1) as link:
        whole = train(link, way, "none", str(tmp_path / "whole"))
    with start(ALONE, device="cuda", threads=1, group_of_one=True) as link:
        cut = train(link, way, "full", str(tmp_path / "cut"))
    assert_near(cut, whole, way)


@pytest.mark.parametrize(("size", "machines", "shard"), [(2, 1, "full"), (4, 2, "node")])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_a_gpu(way: str, size: int, machines: int, shard: str, tmp_path: Path) -> None:
    if way == "joined norms" and size == 2:
        pytest.skip("one grain for each of four ranks")
    whole = run_ranks(size, on_shared_gpu, way, "none", str(tmp_path / "whole"), machines=machines, timeout_s=200.0)
    cut = run_ranks(size, on_shared_gpu, way, shard, str(tmp_path / "cut"), machines=machines, timeout_s=200.0)
    assert_near(cut[0], whole[0], way)
