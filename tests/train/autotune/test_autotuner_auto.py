"""No level typed, on a GPU: the fastest known way is taken, tried once, stored and taken again. The GPU is a CPU that
says it is one, its recorder replays on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.config.settings import TrainConfig
from paceline.core.errors import Failed
from paceline.data.plan import BatchRule, Plan
from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.choice import CannotRun
from paceline.speed.precision import Capabilities
from paceline.train.apply import restore_for_use
from paceline.train.autotune import autotuner, shapes, timing
from paceline.train.autotune.autotuner import is_asked, why_no_graphs
from paceline.train.autotune.shapes import Ahead, Pick, covering, shapes_ahead
from paceline.train.loop import train
from paceline.train.resume import SettingsChanged
from paceline.train.run import Run
from paceline.train.setup import few_shapes
from paceline.train.task import Accelerates, Task
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.speed.test_graphs import Again
from tests.train.small import CPU, Recordable, SmallTask, alone, assert_same, opened, weights

pytestmark = pytest.mark.usefixtures("own_cache")
H200 = Capabilities("cuda", "an H200", bf16=True, tf32=True, fp16=True, compiler=False, generation=(9, 0))
V100 = replace(H200, name="a V100", bf16=False, tf32=False, generation=(7, 0))


class Whole(Recordable, Accelerates):
    """Its kernels are its plain modules, all of them."""

    def accelerate(self, model: nn.Module) -> list[str]:
        return []


def pretend(monkeypatch: pytest.MonkeyPatch, fails: dict[str, str] | None = None) -> list[str]:
    """An H200 on which some ways cannot run. Returns the names of those that were tried."""
    tried: list[str] = []

    def try_out(candidate: Candidate, **_: Any) -> None:
        tried.append(candidate.name)
        why = (fails or {}).get(candidate.name)
        if why is not None:
            raise CannotRun(why)

    monkeypatch.setattr(precision, "capabilities", lambda device: H200)
    monkeypatch.setattr(autotuner, "why_no_kernels", lambda task, *_: None if hasattr(task, "accelerate") else "none")
    monkeypatch.setattr(autotuner, "CudaRecorder", lambda device: Again())
    monkeypatch.setattr(timing, "try_out", try_out)
    return tried


def auto(task: Task, out: Path | None, link: Link | None = None, **settings: Any) -> Run:
    made = opened(task, out, link, **{"level": "auto", "steps": 4, **settings})
    train(made)
    return made


def test_the_fastest_known_way_is_taken_without_a_contest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = pretend(monkeypatch)
    run = auto(Whole(), tmp_path / "run")
    assert tried == ["-O2 + kernels + graphs"]
    chosen = run.stepper.precision
    assert (chosen.level, chosen.name, chosen.kernels, chosen.graphs) == (2, "-O2 + kernels", True, True)
    assert run.stepper.recorded is not None
    assert run.stepper.recorded.graphs.num_plain == 0
    text = capsys.readouterr().out
    assert "auto is -O2 + kernels + graphs: the fastest known on compute capability 9.0, not measured" in text
    assert "auto adds" in text
    assert "the task's kernels and CUDA graphs" in text
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["choice"]["way"] == {"level": 2, "kernels": True, "graphs": True}
    plain = opened(SmallTask(), None, level=2, steps=4)
    train(plain)
    assert_same(weights(run), weights(plain))


def test_a_task_with_nothing_to_choose_is_neither_tried_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch)
    monkeypatch.setattr(autotuner, "costly_shapes", None)  # not called
    run = auto(SmallTask(), None)
    assert tried == []
    assert run.stepper.precision.name == "-O2"
    assert not run.stepper.precision.is_open


def test_what_fails_is_told_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = pretend(monkeypatch, {"-O2 + kernels + graphs": "no such instruction", "-O2 + kernels": "the same"})
    run = auto(Whole(), tmp_path / "one")
    assert tried == ["-O2 + kernels + graphs", "-O2 + kernels", "-O2 + graphs"]
    assert run.stepper.precision.name == "-O2"
    assert "-O2 + kernels + graphs cannot run here: no such instruction" in capsys.readouterr().out
    auto(Whole(), tmp_path / "two")
    assert len(tried) == 3
    text = capsys.readouterr().out
    assert "the fastest known that runs here, as an earlier run has found" in text
    assert "no such instruction" in text


def test_memory_that_was_full_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch, {"-O2 + kernels + graphs": timing.FULL})
    for number in (1, 2):
        auto(Whole(), None)
        assert len(tried) == 2 * number


def test_a_contest_on_this_machine_goes_before_the_table(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tried = pretend(monkeypatch)
    times |= {
        "-O2 + kernels + graphs": 3.0,
        "-O2 + kernels": 3.0,
        "-O2 + graphs": 2.9,
        "-O2": 2.8,
        "-O1": 1.0,
        "-O0": 4,
    }
    train(opened(Whole(), None, level=4, steps=1))
    asked = len(times["asked"])
    run = auto(Whole(), None, steps=1)
    assert (tried, len(times["asked"])) == ([], asked)
    assert run.stepper.precision.name == "-O1"
    text = capsys.readouterr().out
    assert "auto is -O1: 500 ms a step, measured by an earlier run on this machine" in text


def test_a_way_that_auto_took_does_not_stand_for_a_contest(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, Any]
) -> None:
    pretend(monkeypatch, {"-O2 + kernels + graphs": "no"})
    times |= {
        "-O2 + kernels + graphs": 3.0,
        "-O2 + kernels": 3.0,
        "-O2 + graphs": 2.9,
        "-O2": 2.8,
        "-O1": 1.0,
        "-O0": 4,
    }
    auto(Whole(), None, steps=1)
    assert not times["asked"]
    train(opened(Whole(), None, level=4, steps=1))
    assert times["asked"]


def test_a_resumed_run_takes_its_choice_and_another_precision_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = pretend(monkeypatch)
    whole = auto(Whole(), None, steps=6)
    auto(Whole(), tmp_path / "run", steps=3)
    assert len(tried) == 1  # it was remembered
    again = auto(Whole(), tmp_path / "run", steps=6, resume="auto", allow_change=True)
    assert len(tried) == 1
    assert "auto is -O2 + kernels + graphs: as before" in capsys.readouterr().out
    assert_same(weights(again), weights(whole))
    monkeypatch.setattr(autotuner, "why_no_graphs", lambda *_: "no CUDA graphs: not today")
    calm = auto(Whole(), tmp_path / "run", steps=6, resume="auto")  # graphs change no number
    assert not calm.stepper.precision.graphs
    monkeypatch.setattr(autotuner, "why_no_kernels", lambda *_: "no kernels: no Triton")
    with pytest.raises(SettingsChanged, match="precision on this device"):
        auto(Whole(), tmp_path / "run", steps=6, resume="auto")
    monkeypatch.setattr(precision, "capabilities", lambda device: CPU)
    with pytest.raises(SettingsChanged, match="precision on this device"):
        auto(Whole(), tmp_path / "run", steps=6, resume="auto")


def test_a_run_from_before_goes_on_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` was -O2 then: no choice in its checkpoint, and batches padded to their longest."""
    tried = pretend(monkeypatch)
    with monkeypatch.context() as then:
        then.setattr(autotuner, "is_asked", lambda *_: False)
        auto(Whole(), tmp_path / "run", steps=3)
    again = auto(Whole(), tmp_path / "run", steps=6, resume="auto", allow_change=True)
    assert tried == []
    assert again.stepper.precision.name == "-O2"
    assert again.stepper.recorded is None
    whole = opened(SmallTask(), None, level=2, steps=6)
    train(whole)
    assert_same(weights(again), weights(whole))


def test_fp16_is_recorded_with_its_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is read at each replay: half as large after an overflow, as without graphs."""

    class Steep(SmallTask):
        def loss(self, model: nn.Module, grain: Any) -> Any:
            total, count = super().loss(model, grain)
            return total * 3e4, count

    class Recorded(Steep, Recordable): ...

    pretend(monkeypatch)
    monkeypatch.setattr(autotuner, "why_no_kernels", lambda *_: "no kernels: fp16")
    found = {}
    for task in (Recorded(), Steep()):
        run = auto(task, None, precision="fp16", steps=12, lr=1e-6, epochs=None)
        assert (run.stepper.recorded is not None) == isinstance(task, Recordable)
        found[type(task)] = run
    recorded, plain = found.values()
    assert recorded.stepper.precision.name == plain.stepper.precision.name == "--precision fp16"
    assert recorded.stepper.scale.current() == plain.stepper.scale.current() < 2.0**14
    assert recorded.stepper.skips.state()[0] == 0
    assert_same(weights(recorded), weights(plain))


def test_a_run_is_used_in_the_level_that_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    made = auto(Whole(), tmp_path / "run", steps=3)
    config = made.config.model_copy(update={"resume": tmp_path / "run/checkpoints/step-00000003"})
    assert restore_for_use(Whole(), config, alone(), config.resume).precision.autocast is torch.bfloat16
    monkeypatch.setattr(precision, "capabilities", lambda device: CPU)
    assert restore_for_use(Whole(), config, alone(), config.resume).precision.autocast is None  # as ever on a CPU


def on_ranks(link: Link, cache: str) -> tuple[list[str], str, dict[str, torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        tried = pretend(patch)
        if not link.is_first:  # what one rank cannot do is done by none
            patch.setattr(autotuner, "why_no_kernels", lambda *_: "no kernels: no Triton on this machine")
        run = auto(Whole(), None, link, grains=2)
        return tried, run.stepper.precision.name, weights(run)


def test_all_ranks_take_what_all_can_do(tmp_path: Path) -> None:
    first, second = run_ranks(2, on_ranks, str(tmp_path / "cache"))
    assert (first[0], second[0]) == (["-O2 + graphs"], [])
    assert first[1] == second[1] == "-O2"
    assert_same(first[2], second[2])


def test_who_is_asked() -> None:
    def asked(device: Capabilities, **settings: Any) -> bool:
        return is_asked(TrainConfig(epochs=1, **settings), device)

    assert asked(H200)
    assert asked(H200, precision="fp16")
    assert asked(V100, precision="fp16")
    assert not asked(V100)  # no bf16: -O0, as ever
    assert not asked(CPU)
    assert asked(CPU, level=4)
    assert not asked(H200, level=2)
    assert not asked(H200, precision="fp64")
    assert not asked(H200, shard="full")


def test_one_setting_turns_graphs_off() -> None:
    config = TrainConfig(epochs=1, cuda_graphs=False)
    assert why_no_graphs(Recordable(), config, H200, True) == "no CUDA graphs: `cuda_graphs` is off"
    assert why_no_graphs(Recordable(), TrainConfig(epochs=1, precision="fp16"), H200, True) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_which_runs_have_few_shapes(device: str) -> None:
    def few(level: Any, name: Any = None) -> bool:
        config = TrainConfig(epochs=1, level=level, precision=name)
        return few_shapes(
            config, precision.resolve(level, name, replace(H200, compiler=True)), torch.device(device), None
        )

    is_gpu = device == "cuda"
    assert few(4)
    assert [few("auto"), few(2), few(3), few("auto", "fp16"), few(0, "fp16-master")] == [is_gpu] * 5
    assert [few(0), few(1), few("auto", "fp64")] == [False] * 3  # the reference, alike on every device


def test_a_device_that_fails_in_a_replay_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Recordable):
        """The device reports an error at its third call: the recording's runs are the first ones."""

        calls = 0

        def loss(self, model: nn.Module, grain: Any) -> Any:
            self.calls += 1
            if self.calls > 10:
                raise torch.AcceleratorError("CUDA error: unspecified launch failure\nmore lines")
            return super().loss(model, grain)

    pretend(monkeypatch)
    with pytest.raises(Failed, match="unspecified launch failure") as failure:
        auto(Breaks(), None, steps=30)
    assert "--no-cuda-graphs" in failure.value.hint
    with pytest.raises(torch.AcceleratorError):  # without graphs it is what it is
        auto(Breaks(), None, steps=30, cuda_graphs=False)


def test_shapes_that_cover_an_epoch() -> None:
    picks = [Pick(0, 0, 0.5), Pick(1, 0, 0.25), Pick(2, 0, 0.125), Pick(3, 0, 0.125)]
    assert covering(picks, 0.875) == picks[:3]
    assert covering(picks, 1.0) == picks
    assert covering(picks[:1], 0.875) == picks[:1]
    assert covering([], 0.875) == []
    comes_back = replace(picks[3], times=2)
    assert Ahead([*picks, comes_back], is_all=True).worth_recording(0.75) == [comes_back]
    assert Ahead([*picks, comes_back], is_all=False).worth_recording(0.75) == picks[:2]


class AsItIs:
    """Pads to nothing but the longest."""

    def padded(self, length: float) -> float:
        return length


def test_shapes_of_later_epochs_are_seen_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 33, 40).astype(np.float64)
    rule = BatchRule(max_samples=4)
    plans = [Plan(40, rule=rule, grains=1, seed=0, epoch=epoch, lengths=lengths, order="random") for epoch in range(20)]
    come = [(epoch, plan.shapes(step)[0]) for epoch, plan in enumerate(plans) for step in range(plan.num_steps)]
    first = {shape: epoch for epoch, shape in reversed(come)}
    picks, is_all = shapes_ahead(plans, 99, AsItIs())
    assert is_all
    assert {plans[pick.epoch].shapes(pick.step)[0]: pick.epoch for pick in picks} == first
    assert max(first.values()) > 0  # one that the first epoch has not
    assert sum(pick.times for pick in picks) == len(come)
    monkeypatch.setattr(shapes, "LOOKED_AT", 25)
    picks, is_all = shapes_ahead(iter(plans), 99, AsItIs())
    assert not is_all
    assert sum(pick.times for pick in picks) == 30  # whole epochs until it is enough
    assert not shapes_ahead(plans[:3], 99).is_all
    assert shapes_ahead(plans[:2], 99).is_all
