"""Kernels that compute with the weights of many modules at once, in a model that is cut into pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.parallel.sharded.strategy import Sharded
from paceline.speed.autotune.candidates import Candidate
from paceline.train.autotune import autotuner
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import run_ranks
from tests.recipes.speech import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NETWORK: dict[str, Any] = {
    **tiny.PLAIN,
    "blocks": [
        {"filters": 16, "kernel": 5, "stride": 2, "separable": True},
        {"filters": 16, "kernel": 3, "repeat": 2, "residual": True, "separable": True},
        {"filters": 16, "kernel": 1},
    ],
}


def on_shared_gpu(link: Link, data: Path, out: Path, shard: str) -> None:
    link.close()
    with (
        start(link.world, device="cuda", threads=1, share_devices=True) as shared,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_CACHE_HOME", str(out))
        patch.setattr(autotuner, "candidates", lambda *_, **__: [Candidate(2, kernels=True)])
        settings = tiny.settings(data, out=out / "run", network=NETWORK, level=4, epochs=2, shard=shard)
        run = tiny.train(settings, shared)
        assert run.stepper.precision.kernels
        assert isinstance(run.stepper.prepared.strategy, Sharded) == (shard != "none")


def test_a_run_with_kernels(tmp_path: Path) -> None:
    tiny.speech(tmp_path / "speech", "train", 26, seed=1)
    for shard in ("none", "full"):
        run_ranks(2, on_shared_gpu, tmp_path / "speech", tmp_path / shard, shard, timeout_s=200.0)
    whole, cut = (tiny.losses_of(tmp_path / shard / "run") for shard in ("none", "full"))
    assert len(cut) > 4
    assert cut == pytest.approx(whole, rel=0.02)
