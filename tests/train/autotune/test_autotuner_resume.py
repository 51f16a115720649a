"""`-O4` after an interruption: what was chosen is taken again, and where that cannot be had nothing else is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.speed import precision
from paceline.speed.precision import Capabilities
from paceline.train.autotune import autotuner, timing
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint import state
from paceline.train.loop import train
from paceline.train.run import Run
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.speed.test_graphs import Again
from tests.train.small import CPU, OLD_CPU, Recordable, SmallTask, assert_same, opened, weights

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_resumed_run_takes_its_own_choice(tmp_path: Path, times: dict[str, Any]) -> None:
    times |= {"-O0": 2.0, "-O1": 3.0, "-O2": 1.0}
    whole = opened(SmallTask(), tmp_path / "whole", level=4, steps=6)
    train(whole)
    train(opened(SmallTask(), tmp_path / "parts", level=4, steps=3))
    times["-O2"] = 9.0
    for file in (tmp_path / "cache/paceline/ways").iterdir():
        file.unlink()
    asked = len(times["asked"])
    found = restore.newest(tmp_path / "parts/checkpoints").checkpoint
    assert found is not None
    assert found.state["choice"]["way"]["level"] == 2
    again = opened(SmallTask(), tmp_path / "parts", level=4, steps=6, resume="auto", allow_change=True)
    train(again)
    assert len(times["asked"]) == asked
    assert again.stepper.precision.autocast is torch.bfloat16
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(again)[name]), name


def test_the_record_of_a_finished_run_keeps_its_choice(tmp_path: Path, times: dict[str, Any]) -> None:
    times |= {"-O0": 2.0, "-O1": 3.0, "-O2": 1.0}
    for resume in ("no", "auto"):
        train(opened(SmallTask(), tmp_path / "run", level=4, steps=3, resume=resume))
        assert json.loads((tmp_path / "run/run.json").read_text())["choice"]["way"]["level"] == 2


def optimizer_state(made: Run) -> dict[str, torch.Tensor]:
    parts, _ = state.collect(made.stepper)
    return {**parts["optimizer"], **{f"scale {name}": tensor for name, tensor in parts["scale"].items()}}


@pytest.mark.parametrize(
    ("before", "then", "settings"),
    [
        (4, OLD_CPU, {}),
        (0, CPU, {}),
        (0, CPU, {"ema": 0.9, "optimizer": "sgd"}),
        (0, CPU, {"precision": "fp16"}),
        (0, CPU, {"precision": "fp16-master"}),
    ],
    ids=["its level is gone", "from -O0", "average", "fp16", "masters"],
)
def test_a_run_that_chooses_anew_goes_on_as_it_was(
    tmp_path: Path,
    times: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    then: Capabilities,
    settings: dict[str, Any],
) -> None:
    """Optimizer, loss scale and average: as if it had been resumed with what it chooses."""
    settings = {"optimizer": "adamw", "clip_norm": 1.0, **settings}
    times |= {"-O0": 2.0, "-O2": 1.0}
    for name in ("fastest", "plain"):
        train(opened(SmallTask(), tmp_path / name, level=before, steps=9, **settings))
    monkeypatch.setattr(precision, "capabilities", lambda device: then)
    times |= {"-O0": 1.0, "-O2": 2.0}
    again = {"steps": 18, "resume": "auto", "allow_change": True, **settings}
    asked = len(times["asked"])
    anew = opened(SmallTask(), tmp_path / "fastest", level=4, **again)
    train(anew)
    assert len(times["asked"]) > asked
    plain = opened(SmallTask(), tmp_path / "plain", level=0, **again)
    train(plain)
    found, expected = optimizer_state(anew), optimizer_state(plain)
    assert_same(found, expected)
    counts = [tensor for name, tensor in found.items() if name.endswith("step")]
    assert all(count == 18 for count in counts)
    assert counts or settings["optimizer"] == "sgd"
    assert_same(weights(anew), weights(plain))
    if anew.stepper.prepared.average is not None and plain.stepper.prepared.average is not None:
        assert_same(anew.stepper.prepared.average.state_dict(), plain.stepper.prepared.average.state_dict())


def on_ranks_anew(link: Link, folder: str, cache: str) -> list[dict[str, torch.Tensor]]:
    """Ranks that step apart, each with its own optimizer state and a common velocity; -O4 and -O0 after the same."""
    settings = {"optimizer": "adamw", "grains": 2, "reduce": "param", "sync_step": 2, "sync_state": "keep"}
    settings |= {"outer": "momentum", "outer_momentum": 0.5}
    found: list[dict[str, torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setattr(precision, "capabilities", lambda device: OLD_CPU)
        patch.setattr(timing, "step_seconds", lambda way, limit_s, workload: 1.0)
        patch.setattr(timing, "in_turns", lambda ways, workload: dict.fromkeys(ways, 1.0))
        for level in (4, 0):
            out = Path(folder) / str(level)
            train(opened(SmallTask(), out, link, level=0, steps=5, **settings))
            made = opened(SmallTask(), out, link, level=level, steps=10, resume="auto", allow_change=True, **settings)
            train(made)
            velocities = made.stepper.prepared.strategy.state().common
            assert velocities
            found.append(
                {**weights(made), **optimizer_state(made), **{f"outer {key}": v for key, v in velocities.items()}}
            )
    return found


def test_ranks_that_step_apart_choose_anew(tmp_path: Path) -> None:
    for anew, plain in run_ranks(2, on_ranks_anew, str(tmp_path / "run"), str(tmp_path / "cache")):
        assert any(name.startswith("outer") for name in plain)
        assert_same(anew, plain)


def test_graphs_that_cannot_be_had_now_may_be_later(
    tmp_path: Path, times: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chosen on one GPU, resumed where there are none, and then on one GPU again."""
    monkeypatch.setattr(autotuner, "CudaRecorder", lambda device: Again())
    times |= {"-O2 + graphs": 1.0, "-O2": 2.0, "-O0": 3.0}
    reasons = iter([None, "no CUDA graphs: no GPU", None])
    used = []
    for steps in (2, 4, 6):
        why = next(reasons)
        monkeypatch.setattr(autotuner, "why_no_graphs", lambda *_, why=why: why)
        run = opened(Recordable(), tmp_path / "run", level=4, steps=steps, resume="auto", allow_change=True)
        train(run)
        used.append(run.stepper.precision.graphs)
        assert json.loads((tmp_path / "run/run.json").read_text())["choice"]["way"]["graphs"]
        if why is not None:
            assert why in capsys.readouterr().out
    assert used == [True, False, True]
    assert len(times["asked"]) == 3
