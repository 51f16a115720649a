"""Means of weights: of checkpoints, written, validated and used; and while a run trains, with their own statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.cli.main import main
from paceline.config.settings import TrainConfig
from paceline.core.errors import Conflict, NotFound
from paceline.data.grain import Grain
from paceline.optim.swa import StochasticAverage
from paceline.train import apply, loop
from paceline.train.average import (
    NameTaken,
    NothingToMeasureOn,
    choose_parts,
    mean_of,
    write_mean,
)
from paceline.train.checkpoint import reader
from paceline.train.checkpoint.format import listed
from paceline.train.norm_statistics import chosen_batches
from paceline.train.run import Run, open_run
from paceline.train.task import Task
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.small import alone, points


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.body(x)))).squeeze(1)


class NormedTask(Task):
    """With batch norm; grains of 4."""

    def model(self) -> nn.Module:
        return Normed()

    def train_data(self) -> Any:
        return points(24, 1)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": points(10, 2)}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        x, y = grain.data
        return (model(x) - y.to(x.dtype)).square().sum(), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
        return {"loss": self.loss(model, grain)}


class PlainTask(NormedTask):
    """Without."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0))


def config(out: Path | None, **changes: Any) -> TrainConfig:
    plain = {
        "global_batch": 8,
        "grains": 2,
        "epochs": 4,
        "lr": 0.05,
        "loggers": (),
        "progress": "none",
        "device": "cpu",
    }
    saved = {"save_every_steps": 1, "keep_last": 99, "val_every_steps": 1, "workers": 0, "level": 0}
    return TrainConfig(**{**plain, **saved, "out": out, **changes})


def train(out: Path, task: type[Task] = NormedTask, link: Link | None = None, **changes: Any) -> Run:
    made = task()
    made.spec = f"{__file__}:{task.__name__}"
    trainer = open_run(made, config(out, **changes), link or alone())
    loop.train(trainer)
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "normed"
    train(out)
    return out


def by_hand(paths: list[Path]) -> dict[str, torch.Tensor]:
    """The mean in float64."""
    each = [apply.read_weights(path) for path in paths]
    return {name: sum(weights[name].double() for weights in each) / len(each) for name in each[0]}  # type: ignore[misc]


# -- of checkpoints ----------------------------------------------------------------------------------------------------


def test_the_last_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["average", str(run), "--last", "3", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    path = run / "checkpoints" / "average-last-3"
    expected = by_hand(listed(run / "checkpoints")[:3])
    for name, tensor in apply.read_weights(path).items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor.double(), expected[name], rtol=1e-7, atol=0), name
            assert torch.equal(tensor, expected[name].float()), name
    assert [line.split()[0] for line in said.splitlines()[:4]] == [
        *("step-00000012", "step-00000011", "step-00000010", "average-last-3")
    ]
    assert "dev/loss: " in said
    assert "--checkpoint average-last-3" in said
    assert listed(run / "checkpoints")[0].name == "step-00000012"  # a run goes on from its own
    assert main(["average", str(run), "--best", "1", "--json", "--no-validate"]) == 0
    shown = capsys.readouterr()
    (part,) = json.loads(shown.out)["parts"]
    assert f"nothing is averaged: average-best-1 is a copy of {part['checkpoint']}; choose several" in shown.err


def test_it_is_used_as_any_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = paceline.average(run, best=4, device="cpu")
    assert isinstance(done, paceline.Averaged)
    assert done.path.name == "average-best-4"
    known = sorted(reader.load(path, []).score or 0.0 for path in listed(run / "checkpoints"))
    assert sorted(score or 0.0 for score in done.scores) == known[:4]
    assert done.score == done.metrics["dev/loss"] == reader.load(done.path, []).score
    assert main(["eval", str(run), "--checkpoint", "average-best-4", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == done.metrics
    model = paceline.load(run, checkpoint="average-best-4")
    assert main(["export", str(run), str(tmp_path / "out"), "--checkpoint", "average-best-4"]) == 0
    expected = by_hand(list(done.parts))
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, expected[name].float()), name
    assert reader.load(done.path, []).state["average"] == [path.name for path in done.parts]


def test_a_range_of_steps_and_a_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--from-step", "3", "--to-step", "6", "--name", "early", "--no-validate", "--json"]
    assert main(["average", str(run), *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [part["checkpoint"] for part in result["parts"]] == [f"step-0000000{step}" for step in (6, 5, 4, 3)]
    assert (result["score"], result["metrics"]) == (None, {})
    assert [part.step for part in choose_parts(run, best=2, to_step=5)] == [5, 4]
    assert len(choose_parts(run)) == 12


def test_measured_statistics_are_those_of_torch(run: Path) -> None:
    """Of all 6 batches of 4 samples: the statistics that `update_bn` gives the same weights."""
    mean = paceline.average(run, last=5, name="mean", device="cpu")
    done = paceline.average(run, last=5, statistics=100, name="measured", device="cpu")
    weights, model = apply.read_weights(mean.path), Normed()
    model.load_state_dict(weights)
    model.double()
    data = points(24, 1)
    torch.optim.swa_utils.update_bn([data[start : start + 4][0].double() for start in range(0, 24, 4)], model)
    measured = apply.read_weights(done.path)
    for name in ("norm.running_mean", "norm.running_var"):
        assert torch.allclose(measured[name].double(), model.state_dict()[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(measured[name], weights[name])
    assert all(torch.equal(measured[name], weights[name]) for name in weights if "running" not in name)
    assert list(chosen_batches(10, 3)) == [0, 3, 6]
    assert list(chosen_batches(2, 5)) == [0, 1]


def test_what_cannot_be_averaged(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(
        tmp_path / "short",
        PlainTask,
        keep_last=1,
        keep_best=1,
        steps=2,
        epochs=None,
        val_every_steps=None,
        validation=False,
    )
    with pytest.raises(NotFound, match="5 checkpoints of .* cannot be averaged: there is only step-00000002") as one:
        paceline.average(tmp_path / "short", last=5)
    assert "--keep-last 10" in one.value.hint
    with pytest.raises(NotFound, match="there is none with a score"):
        paceline.average(tmp_path / "short", best=2)
    with pytest.raises(NotFound, match="there are only .*"):
        paceline.average(run, last=20)
    assert main(["average", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    with pytest.raises(Conflict, match="both `--last` and `--best`"):
        paceline.average(run, last=2, best=2)
    for name in ("step-00000001", "a/b", ".hidden", "best", "last"):
        with pytest.raises(NameTaken):
            paceline.average(run, last=2, name=name)
    with pytest.raises(ValueError, match="last"):
        paceline.average(run, last=0)
    train(tmp_path / "plain", PlainTask, steps=2, epochs=None)
    with pytest.raises(NothingToMeasureOn, match="the model has none"):
        paceline.average(tmp_path / "plain", statistics=3)
    assert paceline.average(tmp_path / "plain", device="cpu").path.name == "average-all"


def test_names_that_not_all_parts_have(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, older = choose_parts(run, last=2)
    weights = {newest.path: {"a": torch.ones(2)}, older.path: {"a": torch.ones(2), "b": torch.ones(1)}}
    monkeypatch.setattr(apply, "read_weights", weights.__getitem__)
    with pytest.raises(Conflict, match="^b is in step-00000011 and not in step-00000012: they have no mean"):
        mean_of([newest, older])
    with pytest.raises(Conflict, match="^b is in step-00000011 and not in step-00000012"):
        mean_of([older, newest])


def test_a_mean_is_there_until_another_has_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = choose_parts(run, last=2)
    weights = mean_of(parts)
    old = write_mean(run, "kept", weights, parts, score=1.0)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == ".writing-kept":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                write_mean(run, "kept", weights, parts, score=2.0)
            assert reader.load(apply.find_checkpoint(run, Path("kept")), []).score == 1.0
    assert (
        write_mean(run, "kept", weights, parts, score=3.0) == old == apply.find_checkpoint(run, Path("kept")).resolve()
    )
    assert reader.load(old, []).score == 3.0
    assert not list(old.parent.glob(".*kept"))


# -- while a run trains ------------------------------------------------------------------------------------------------


def test_the_mean_of_weights_after_some_steps() -> None:
    """Against float64 by hand: before it begins it is the weights themselves."""
    weight = torch.zeros(3)
    average = StochasticAverage({"w": weight}, start=4, every=3)
    seen: list[torch.Tensor] = []
    for step in range(1, 30):
        weight.copy_(torch.randn(3, generator=torch.Generator().manual_seed(step)))
        average.update(step)
        if step <= 4:
            seen = [weight.double().clone()]
            assert torch.equal(average.tensors["w"], weight)
        elif (step - 4) % 3 == 0:
            seen.append(weight.double().clone())
        assert torch.allclose(average.tensors["w"].double(), torch.stack(seen).mean(0), atol=1e-6)
        assert average.wants_statistics(step) == (step >= 7)
    assert len(seen) == 9


SWA: dict[str, Any] = {"swa_start": 5, "swa_every": 2, "swa_lr": 0.02, "precision": "fp64"}


@pytest.fixture(scope="module")
def swa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("swa") / "run"
    train(out, **SWA)
    return out


def test_a_run_validates_and_saves_the_mean(swa: Path) -> None:
    """Steps 5, 7, 9 and 11, with statistics measured for it; a checkpoint is used with them."""
    steps = {reader.load(path, []).step: path for path in listed(swa / "checkpoints")}
    raw = {step: reader.load(path, ["model"]).parts["model"] for step, path in steps.items()}
    saved = apply.read_weights(steps[12])
    for name in (name for name in saved if "norm.r" not in name and saved[name].is_floating_point()):
        expected = sum(raw[step][name].double() for step in (5, 7, 9, 11)) / 4
        assert torch.allclose(saved[name].double(), expected, rtol=1e-12), name
        assert not torch.equal(saved[name], raw[12][name])
        assert torch.equal(apply.read_weights(steps[4])[name], raw[4][name])
    model = Normed().double()
    model.load_state_dict(saved)
    data = points(24, 1)
    torch.optim.swa_utils.update_bn([data[start : start + 4][0].double() for start in range(0, 24, 4)], model)
    for name in ("norm.running_mean", "norm.running_var"):
        assert torch.allclose(saved[name], model.state_dict()[name], rtol=1e-12)
    with torch.no_grad():
        x, y = points(10, 2)[:]
        loss = (model.eval()(x.double()) - y).square().mean().item()
    assert reader.load(steps[12], []).score == pytest.approx(loss, rel=1e-9)


class CountedTask(NormedTask):
    """Says how often its data was asked for."""

    asked = 0

    def train_data(self) -> Any:
        type(self).asked += 1
        return super().train_data()


def test_its_statistics_are_measured_on_the_data_that_is_there(tmp_path: Path) -> None:
    train(tmp_path / "plain", CountedTask, precision="fp64")
    without, CountedTask.asked = CountedTask.asked, 0
    train(tmp_path / "swa", CountedTask, **SWA)
    assert CountedTask.asked == without


def again(link: Link, out: Path, changes: dict[str, Any]) -> None:
    train(out, link=link, **{**SWA, **changes})


@pytest.mark.parametrize("changes", [{}, {"shard": "full"}], ids=["whole", "sharded"])
def test_ranks_and_a_resume_change_no_bit_of_it(tmp_path: Path, swa: Path, changes: dict[str, Any]) -> None:
    run_ranks(2, again, tmp_path / "two", changes, timeout_s=120.0)
    run_ranks(2, again, tmp_path / "on", {**changes, "resume": swa / "checkpoints" / "step-00000008"}, timeout_s=120.0)
    train(tmp_path / "one", resume=swa / "checkpoints" / "step-00000006", **SWA)
    expected = apply.read_weights(swa / "checkpoints" / "step-00000012")
    for name in ("two", "on", "one"):
        last = tmp_path / name / "checkpoints" / "step-00000012"
        found = apply.read_weights(last)
        for weight, tensor in expected.items():
            close = changes and torch.allclose(found[weight].double(), tensor.double(), rtol=1e-12)
            assert torch.equal(found[weight], tensor) or close, (name, weight)
        assert reader.load(last, []).score == pytest.approx(
            reader.load(swa / "checkpoints" / last.name, []).score, rel=1e-12
        )


def test_settings_that_do_not_go_with_it() -> None:
    with pytest.raises(ValueError, match="not both"):
        config(None, swa_start=5, ema=0.9)
    with pytest.raises(ValueError, match="swa_lr needs swa_start"):
        config(None, swa_lr=0.1)
    with pytest.raises(ValueError, match="joins over ranks"):
        config(None, swa_start=5, sync_batchnorm="all")
