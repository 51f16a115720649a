"""On a real GPU: no level takes the fastest known way, fp16 is recorded and loses no step, kernels compile dry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.speed import compile_kernels as compiling
from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.train.autotune import timing
from paceline.train.run import Run, open_run
from paceline.world.discover.environment import discover
from paceline.world.link import Link
from paceline.world.start import start
from tests.recipes.speech.tiny import PLAIN, losses_of, settings, speech, task, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
NETWORK = {**PLAIN, "blocks": [{**block, "filters": 16} for block in PLAIN["blocks"]]}
"""Of sizes that the kernels know."""


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    speech(tmp_path, "train", 48, 1)


def gpu() -> Link:
    return start(discover({}), device="cuda")


def run(folder: Path, out: str, **changes: Any) -> Run:
    plain = {"network": NETWORK, "device": "cuda", "out": folder / out, "epochs": 4, "grains": 1, "progress": "lines"}
    return train(settings(folder, **{**plain, **changes}), gpu())


def test_no_level_is_the_fastest_known_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, fast = run(tmp_path, "plain", level=2), run(tmp_path, "fast")
    text = capsys.readouterr().out
    is_hopper = precision.capabilities(torch.device("cuda")).generation == (9, 0)
    assert fast.stepper.precision.graphs
    assert fast.stepper.precision.kernels == is_hopper, text
    assert fast.stepper.recorded is not None
    assert fast.stepper.recorded.graphs.num_plain == 0
    assert not fast.stepper.recorded.graphs.failures
    assert losses_of(tmp_path / "fast") == pytest.approx(losses_of(tmp_path / "plain"), rel=0.05)
    assert plain.stages.few_shapes
    assert json.loads((tmp_path / "fast/run.json").read_text())["choice"]["way"]["graphs"]
    again = run(tmp_path, "fast", epochs=5, resume="auto", allow_change=True)
    assert again.stepper.precision.name == fast.stepper.precision.name


@pytest.mark.parametrize("name", ["fp16", "fp16-master"])
def test_fp16_from_graphs_is_fp16_without(tmp_path: Path, name: Any) -> None:
    recorded = run(tmp_path, "recorded", precision=name)
    plain = run(tmp_path, "plain", precision=name, cuda_graphs=False)
    assert recorded.stepper.recorded is not None
    assert recorded.stepper.recorded.graphs.num_replayed > 0
    assert plain.stepper.recorded is None
    assert recorded.stepper.skips.state()[0] <= 2
    assert recorded.stepper.scale.current() == plain.stepper.scale.current()
    assert losses_of(tmp_path / "recorded") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-2)


def test_a_dry_run_compiles_what_a_step_launches(tmp_path: Path) -> None:
    """All that the real step asks for is in Triton's cache by then; and nothing was launched."""
    made = open_run(task(), settings(tmp_path, network=NETWORK, device="cuda", grains=1), gpu())
    feed = made.begin_stage(0)
    grains = list(feed.read([(0, 0)]))
    workload = timing.Workload(made.task, made.config, made.link, made.stepper.model, grains)
    ways = [way for way in (Candidate(2, kernels=True),) if compiling.can_run_dry()]
    assert ways, "this Triton cannot compile dry"
    shown: list[tuple[int, int]] = []
    timing.compile_kernels(ways[0], lambda done, total: shown.append((done, total)), workload=workload)
    assert shown
    assert shown[-1][0] == shown[-1][1]
    kernels = {path.name for path in (tmp_path / "triton").rglob("*.cubin")}
    assert len(kernels) > 5
    timing.try_out(ways[0], workload=workload)
    assert {path.name for path in (tmp_path / "triton").rglob("*.cubin")} == kernels
    feed.close()
