"""`-O4` in a run: chosen once, stored, taken again; recorded grains give the losses of plain ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.config.settings import TrainConfig
from paceline.data.collate import pad_collate
from paceline.data.grain import Grain
from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.precision import Capabilities
from paceline.train import task as tasks
from paceline.train.apply import restore_for_use
from paceline.train.autotune import autotuner, timing
from paceline.train.autotune.autotuner import precision_for_use, why_no_graphs, why_no_kernels
from paceline.train.loop import train
from paceline.train.loss import NonFiniteLoss
from paceline.train.task import Accelerates
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.speed.test_graphs import Again
from tests.train.ragged import RaggedTask
from tests.train.small import BATCH, CPU, OLD_CPU, Recordable, SmallTask, alone, opened, weights

pytestmark = pytest.mark.usefixtures("own_cache")
GPU = Capabilities("cuda", "an H200", bf16=True, tf32=True, fp16=True, compiler=True)


class Kernels(SmallTask, Accelerates):
    """Its kernel is its plain module, twice as sure of itself."""

    accelerated: ClassVar[list[nn.Module]] = []

    def accelerate(self, model: nn.Module) -> list[str]:
        self.accelerated.append(model)
        return ["head: it is too small"]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return found.out + found.err


@pytest.mark.parametrize("level", [0, 2])
def test_what_is_chosen_is_what_is_computed(
    tmp_path: Path, times: dict[str, Any], level: int, capsys: pytest.CaptureFixture[str]
) -> None:
    times |= {"-O0": 2.0, "-O1": 3.0, "-O2": 1.0 if level == 2 else 4.0}
    plain = opened(SmallTask(), tmp_path / "plain", level=level, epochs=2)
    train(plain)
    chosen = opened(SmallTask(), tmp_path / "chosen", level=4, epochs=2)
    train(chosen)
    assert chosen.stepper.precision.level == 4
    assert chosen.stepper.precision.autocast == plain.stepper.precision.autocast
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(chosen)[name]), name
    record = json.loads((tmp_path / "chosen/run.json").read_text())["choice"]
    assert record["way"] == {"level": level, "kernels": False, "graphs": False}
    text = said(capsys)
    assert f"-O4 is -O{level}: " in text
    assert "no kernels: this task has none of its own" in text
    assert "no CUDA graphs: this task does not say" in text


def test_the_machine_remembers(tmp_path: Path, times: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    times |= {"-O0": 2.0, "-O1": 3.0, "-O2": 4.0}
    train(opened(SmallTask(), tmp_path / "one", level=4, steps=1))
    assert times["asked"] == ["-O2", "-O0"]  # not -O1, which is -O0 where there is no TF32
    train(opened(SmallTask(), tmp_path / "two", level=4, steps=1))
    assert times["asked"] == ["-O2", "-O0"]  # not -O1, which is -O0 where there is no TF32
    assert "measured by an earlier run" in said(capsys)
    train(opened(SmallTask(), tmp_path / "three", level=4, steps=1, global_batch=BATCH // 2))  # other shapes
    assert len(times["asked"]) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"compile_mode": "max-autotune"},
        {"clip_norm": 1.0},
        {"clip_value": 1.0},
        {"ema": 0.9},
        {"checkpoint_activations": ("body",)},
        {"larc": "clip"},
        {"optimizer": "adamw"},
        {"groups": ({"match": "head*", "lr_scale": 0.5},)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_a_step_is_made_of_is_measured_apart(
    tmp_path: Path, times: dict[str, Any], settings: dict[str, Any]
) -> None:
    times |= {"-O0": 2.0, "-O2": 4.0}
    train(opened(SmallTask(), None, level=4, steps=1))
    train(opened(SmallTask(), None, level=4, steps=1, lr=0.01, seed=3, schedule="cosine"))  # of no account
    assert len(times["asked"]) == 2
    train(opened(SmallTask(), None, level=4, steps=1, **settings))
    assert len(times["asked"]) == 4


def test_the_choice_is_written_before_the_first_step(tmp_path: Path, times: dict[str, Any]) -> None:
    records: list[dict[str, Any]] = []

    class Looks(SmallTask):
        def before_step(self, model: nn.Module, batch: Any) -> None:
            records.append(json.loads((tmp_path / "run/run.json").read_text()))

    times |= {"-O0": 1.0, "-O2": 2.0}
    train(opened(Looks(), tmp_path / "run", level=4, steps=2))
    assert [record["status"] for record in records] == ["running"] * 2
    assert records[0]["choice"]["way"]["level"] == 0


class Stops(SmallTask):
    """Is asked to stop while the first candidate is measured; remembers if losses were computed in bf16."""

    trainer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.autocasts: set[bool] = set()

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        self.autocasts.add(torch.is_autocast_enabled("cpu"))
        if self.trainer is not None:
            self.trainer.ask_to_stop()
        return super().loss(model, grain)


def stopped_and_resumed(link: Link, folder: str) -> None:
    settings = {"level": 4, "steps": 4, "link": link}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "capabilities", lambda _: CPU)
        patch.setenv("XDG_CACHE_HOME", f"{folder}-cache")
        patch.setattr(autotuner, "candidates", lambda *_, **__: [Candidate(2), Candidate(0)])
        task = Stops()
        first = opened(task, Path(folder), **settings)
        task.trainer = first if link.is_first else None
        result = train(first)
        assert (result.status, result.num_steps, first.stages.choice) == ("stopped", 0, None)
        assert task.autocasts == ({True} if link.is_first else set())  # -O0 was not measured
        second = opened(Stops(), Path(folder), resume="auto", **settings)
        assert train(second).num_steps == 4
        assert second.stages.choice is not None
        assert set(second.stages.choice.step_ms) == {"-O2", "-O0"}


@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_ends_the_contest_and_a_resumed_run_begins_it_anew(size: int, tmp_path: Path) -> None:
    run_ranks(size, stopped_and_resumed, str(tmp_path / "run"))


class NanInBf16(SmallTask):
    hurts = ("bf16",)

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        total, count = super().loss(model, grain)
        kind = "bf16" if torch.is_autocast_enabled("cpu") else "fp32"
        return total * (float("nan") if kind in self.hurts else 1.0), count


def test_a_way_without_a_finite_loss_is_left_out(tmp_path: Path) -> None:
    run = opened(NanInBf16(), tmp_path / "run", level=4, steps=3)
    train(run)
    assert run.stages.choice is not None
    assert run.stages.choice.candidate == Candidate(0)
    assert any("-O2 cannot run here: NonFiniteLoss" in note for note in run.stepper.precision.notes)


def test_a_loss_that_is_never_finite_ends_the_run_as_ever(tmp_path: Path) -> None:
    class Nan(NanInBf16):
        hurts = ("bf16", "fp32")

    with pytest.raises(NonFiniteLoss):
        train(opened(Nan(), tmp_path / "run", level=4, steps=3))


def test_measuring_leaves_the_run_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Really measured: the weights after it are those of a run of the chosen level."""
    chosen = opened(SmallTask(), tmp_path / "chosen", level=4, epochs=2)
    train(chosen)
    assert chosen.stages.choice is not None
    times = chosen.stages.choice.step_ms
    assert set(times) == {"-O0", "-O2"}
    assert times[chosen.stages.choice.candidate.name] <= min(times.values()) * 1.0301  # rounded in the record
    plain = opened(SmallTask(), tmp_path / "plain", level=chosen.stages.choice.candidate.level, epochs=2)
    train(plain)
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(chosen)[name]), name


def test_kernels_are_put_into_the_model_that_is_trained(
    tmp_path: Path, times: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autotuner, "why_no_kernels", lambda *_: None)
    times |= {"-O2 + kernels": 1.0, "-O2": 2.0}
    Kernels.accelerated.clear()
    run = opened(Kernels(), tmp_path / "run", level=4, steps=4)
    train(run)
    assert run.stepper.precision.kernels
    assert sum(model is run.stepper.model for model in Kernels.accelerated) == 1
    assert "without a kernel: head: it is too small" in said(capsys)


class Broken(SmallTask, Accelerates):
    def accelerate(self, model: nn.Module) -> list[str]:
        raise RuntimeError("no such instruction")


def test_kernels_that_fail_cost_only_themselves(
    tmp_path: Path, times: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuner, "why_no_kernels", lambda *_: None)
    times |= {"-O2": 1.0}
    run = opened(Broken(), tmp_path / "run", level=4, steps=1)
    train(run)
    assert run.stages.choice.candidate.name == "-O2"
    assert any(note.startswith("-O2 + kernels cannot run here") for note in run.stages.choice.notes)


def test_a_choice_is_made_anew_for_other_kernels(
    tmp_path: Path, times: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a version they get faster, and there are more ways to choose from."""
    times |= {"-O2": 1.0}
    known = "measured by an earlier run on this machine"
    for number, digest in enumerate(("one", "one", "other")):
        monkeypatch.setattr(autotuner, "_digest_of", lambda _, digest=digest: digest)
        train(opened(SmallTask(), tmp_path / str(number), level=4, steps=1))
        assert (known in said(capsys)) == (number == 1)


@pytest.mark.parametrize("grains", [1, 2])
def test_recorded_grains_give_the_losses_of_plain_ones(
    tmp_path: Path,
    times: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    grains: int,
) -> None:
    """With a recorder that replays on the CPU: the whole way through trainer and engine."""
    monkeypatch.setattr(autotuner, "why_no_graphs", lambda *_: None)
    monkeypatch.setattr(autotuner, "CudaRecorder", lambda device: Again())
    times |= {"-O2 + graphs": 1.0, "-O2": 2.0}
    recorded = opened(Recordable(), tmp_path / "recorded", level=4, epochs=3, grains=grains, clip_norm=1.0)
    train(recorded)
    plain = opened(SmallTask(), tmp_path / "plain", level=2, epochs=3, grains=grains, clip_norm=1.0)
    train(plain)
    assert recorded.stepper.recorded is not None
    graphs = recorded.stepper.recorded.graphs
    assert (graphs.num_recorded, graphs.num_plain) == (2, 0)  # whole batches, and the last of each epoch: both warmed
    assert graphs.num_replayed == 9 * grains
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(recorded)[name]), name
    assert f"{9 * grains} grains replayed, 0 run without" in said(capsys)
    lines = [json.loads(line) for line in (tmp_path / "recorded/metrics.jsonl").read_text().splitlines()]
    assert [line["graphs"]["replayed"] for line in lines if line["kind"] == "epoch"][-1] == 9 * grains


class InSevens:
    """Pads to 7, 14, 21, ... frames."""

    def __call__(self, samples: list[Any]) -> Any:
        x, y, *lengths = pad_collate(samples)
        more = int(self.padded(x.shape[1])) - x.shape[1]
        return F.pad(x, (0, 0, 0, more)), F.pad(y, (0, more)), *lengths

    def padded(self, length: float) -> float:
        return -(-length // 7) * 7


class RaggedInSevens(RaggedTask, tasks.Recordable):
    def train_collate(self, data: Any) -> Any:
        return InSevens()

    def recordable(self, grain: Grain) -> Any:
        return grain.data


def test_shapes_are_those_that_a_collate_function_pads_to(
    tmp_path: Path, times: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six widths of 38 lengths, and room for six graphs: all are recorded before the first step."""
    monkeypatch.setattr(autotuner, "why_no_graphs", lambda *_: None)
    monkeypatch.setattr(autotuner, "CudaRecorder", lambda device: Again())
    monkeypatch.setattr(autotuner, "MOST_GRAPHS", 6)
    monkeypatch.setattr(autotuner, "RECORDED_SHARE", 1.0)
    times |= {"-O2 + graphs": 1.0, "-O2": 2.0}
    run = opened(RaggedInSevens(), None, level=4, epochs=1, global_batch=3, order="sorted")
    train(run)
    assert run.stepper.recorded is not None
    graphs = run.stepper.recorded.graphs
    assert (graphs.num_recorded, graphs.num_replayed, graphs.num_plain) == (6, 65, 0)


def test_a_run_is_used_in_the_level_that_it_chose(tmp_path: Path, times: dict[str, Any]) -> None:
    times |= {"-O0": 2.0, "-O1": 3.0, "-O2": 1.0}
    made = opened(SmallTask(), tmp_path / "run", level=4, steps=3)
    train(made)
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    config = made.config.model_copy(update={"resume": checkpoint})
    engine = restore_for_use(SmallTask(), config, alone(), checkpoint)
    assert engine.precision.autocast is torch.bfloat16
    assert not engine.precision.is_open
    record = json.loads((tmp_path / "run/run.json").read_text())["choice"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "capabilities", lambda device: OLD_CPU)
        assert precision_for_use(record, config, torch.device("cpu")).autocast is None


def on_ranks(link: Link, folder: str, cache: str) -> tuple[list[str], dict[str, Any], dict[str, torch.Tensor]]:
    """What was measured on this rank, what was chosen, and the weights; a rank but the first would choose otherwise."""
    asked: list[str] = []

    def measure(way: Candidate, limit_s: float, **rest: Any) -> float:
        asked.append(way.name)
        return 1.0 + way.level if link.is_first else 9.0 - way.level

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setattr(precision, "capabilities", lambda device: CPU)
        patch.setattr(timing, "step_seconds", measure)
        patch.setattr(timing, "in_turns", lambda ways, workload: {way: 1.0 + way.level for way in ways})
        run = opened(SmallTask(), Path(folder), link, level=4, epochs=2, grains=2)
        train(run)
    assert run.stages.choice is not None
    return asked, run.stages.choice.record(), weights(run)


def test_all_ranks_take_what_the_first_one_finds(tmp_path: Path) -> None:
    first, second = run_ranks(2, on_ranks, str(tmp_path / "run"), str(tmp_path / "cache"))
    assert first[0] == ["-O2", "-O0"]
    assert second[0] == []
    assert first[1] == second[1]
    assert first[1]["way"]["level"] == 0
    plain = opened(SmallTask(), None, level=0, epochs=2, grains=2)
    train(plain)
    for name, tensor in weights(plain).items():
        assert torch.equal(first[2][name], second[2][name])
        assert torch.allclose(tensor, first[2][name], rtol=1e-5)


def test_iterable_data_is_not_measured(tmp_path: Path, times: dict[str, Any]) -> None:
    class Streamed(SmallTask):
        def train_data(self) -> Any:
            data = super().train_data()
            return (data[index] for index in range(len(data)))

    run = opened(Streamed(), tmp_path / "run", level=4, epochs=1)
    train(run)
    assert times["asked"] == []
    assert "not measured" in run.stepper.precision.notes[0]


def test_reasons() -> None:
    config = TrainConfig(epochs=1, level=4)
    assert why_no_graphs(Recordable(), config, GPU, False) is None
    assert why_no_graphs(Recordable(), config, GPU, True) is None
    joined = config.model_copy(update={"sync_batchnorm": "all"})
    assert "sync_batchnorm" in str(why_no_graphs(Recordable(), joined, GPU, True))
    assert why_no_graphs(Recordable(), joined, GPU, False) is None  # there is nobody to join
    assert "no GPU" in str(why_no_graphs(Recordable(), config, CPU, False))
    assert "does not say" in str(why_no_graphs(SmallTask(), config, GPU, False))
    fp16 = TrainConfig(epochs=1, level=4, precision="fp16")
    assert why_no_graphs(Recordable(), fp16, GPU, True) is None
    assert "fp16" in str(why_no_kernels(Kernels(), fp16, GPU))
    again = TrainConfig(epochs=1, level=4, checkpoint_activations=("*",))
    assert "checkpoint_activations" in str(why_no_graphs(Recordable(), again, GPU, False))
    assert "checkpoint_activations" in str(why_no_kernels(Kernels(), again, GPU))
    assert "none of its own" in str(why_no_kernels(SmallTask(), config, GPU))
    assert timing.alone(alone()).world.size == 1
