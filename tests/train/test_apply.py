"""Using a run: metrics against those that training wrote down, predictions against the data's own order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset

from paceline.config.mode import Mode
from paceline.config.settings import TrainConfig
from paceline.core.errors import InvalidSetting, TaskContract
from paceline.data.grain import Grain
from paceline.observe.journal import read
from paceline.train import apply, loop
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint.format import listed, step_of
from paceline.train.fit import fit
from paceline.train.run import open_run
from paceline.train.task import HasStages, ReadsInputs, Stage, Task, read_inputs
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.ragged import Ragged, RaggedTask
from tests.train.small import Net, ScoredTask, SmallTask, alone, opened, points

SIZES = (1, 2, 3)


class Told(RaggedTask):
    """Predicts the number and the length of each sample, which tells which one it was."""

    def predict(self, model: nn.Module, grain: Grain) -> Any:
        assert not model.training
        return [[int(sample), int(length)] for sample, length in zip(grain.samples, grain[2], strict=True)]


class Valued(SmallTask):
    def predict(self, model: nn.Module, grain: Grain) -> Any:
        return model(grain.x)


def config(out: Path | None, **settings: Any) -> TrainConfig:
    plain = {"global_batch": 24, "grains": 3, "precision": "fp64", "workers": 0, "keep_last": 99, "epochs": 3}
    return TrainConfig(out=out, **{**plain, **settings})


def train(link: Link, out: Path, settings: dict[str, Any]) -> None:
    loop.train(open_run(Told(), config(out, **settings), link))


def evaluate(link: Link, out: Path, settings: dict[str, Any], which: apply.Which) -> dict[str, float]:
    return apply.evaluate_run(Told(), config(out, **settings), link, out, which)


def predict(link: Link, out: Path, settings: dict[str, Any]) -> list[tuple[int, Any]]:
    return list(apply.predict_run(Told(), config(out, **settings), link, out, "last"))


def logged(out: Path) -> dict[int, dict[str, float]]:
    """Metrics by number of steps, as training wrote them down."""
    return {
        record["step"] + 1: {name: value for name, value in record.items() if "/" in name}
        for record in read(out / "metrics.jsonl", "validation")
    }


# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (2, {"ema": 0.9}), (1, {"batch_cost": 300.0, "ema": 0.5}), (1, {"validation": False})],
)
def test_metrics_are_those_of_training_to_the_last_bit(tmp_path: Path, ranks: int, settings: dict[str, Any]) -> None:
    out = tmp_path / "run"
    run_ranks(ranks, train, out, {**settings, "validation": True})
    expected = logged(out)
    checkpoints = listed(out / "checkpoints")
    assert len(checkpoints) == len(expected) == 3
    for size in SIZES:
        for path in checkpoints if size == 1 else checkpoints[:1]:
            for found in run_ranks(size, evaluate, out, settings, path):
                assert found == expected[step_of(path)]
    assert len({metrics["dev/loss"] for metrics in expected.values()}) == 3


def test_other_sets_may_be_given(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = opened(SmallTask(), out, epochs=1)
    loop.train(trained)
    found = apply.evaluate_run(SmallTask(), trained.config, alone(), out, "last", {"new": points(6, seed=9)})
    x, y = points(6, seed=9).tensors
    with torch.no_grad():
        expected = float((trained.stepper.model(x) - y).square().mean())
    assert found.keys() == {"new/loss", "new/far"}
    assert found["new/loss"] == pytest.approx(expected, rel=1e-6)


def test_best_and_last(tmp_path: Path) -> None:
    task = ScoredTask([0.5, 0.1, 0.3])
    out = tmp_path / "run"
    loop.train(opened(task, out, epochs=3, monitor="dev/score", keep_last=9))
    link = alone()
    assert apply.choose_checkpoint(link, out, "best").name == "step-00000006"
    assert apply.choose_checkpoint(link, out, "last").name == "step-00000009"
    assert apply.choose_checkpoint(link, out, Path("step-00000003")) == out / "checkpoints" / "step-00000003"
    assert apply.choose_checkpoint(link, out, out / "checkpoints" / "step-00000003").name == "step-00000003"


def test_the_best_is_of_the_newest_stage_with_scores(tmp_path: Path) -> None:
    """A score of an earlier stage is of other data; the score of a stage's end is its own, not the next one's."""

    class InStages(ScoredTask, HasStages):
        def stages(self) -> list[Stage]:
            return [Stage("first", self.train_data()), Stage("second", self.train_data())]

    task = InStages([0.2, 0.1, 0.3, 0.4])
    loop.train(opened(task, tmp_path / "run", epochs=2, monitor="dev/score", keep_last=9))
    assert apply.choose_checkpoint(alone(), tmp_path / "run", "best").name == "step-00000009"


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_model_has_the_weights_of_the_checkpoint_or_their_average(tmp_path: Path, ema: float) -> None:
    out = tmp_path / "run"
    trained = opened(SmallTask(), out, epochs=2, ema=ema, optimizer="adamw")
    loop.train(trained)
    checkpoint = apply.choose_checkpoint(alone(), out, "last")
    engine = apply.restore_for_use(SmallTask(), trained.config, alone(), checkpoint)
    parts = restore.load(checkpoint).parts
    assert ("ema" in parts) == bool(ema)
    for name, weight in engine.model.named_parameters():
        assert torch.equal(weight, parts["ema" if ema else "model"][name])
    assert not engine.model.training
    assert not engine.optimizer.state
    assert engine.num_steps == 6


class Growing(SmallTask, HasStages):
    """Each stage widens the model by a layer."""

    def stages(self) -> list[Stage]:
        return [Stage("first", self.train_data()), Stage("second", self.train_data())]

    def before_stage(self, model: nn.Module, stage: int) -> None:
        model.add_module(f"extra{stage}", nn.Linear(2, 2))


def test_a_model_that_grew_has_its_shape_of_then(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = opened(Growing(), out, epochs=1, keep_last=9)
    loop.train(trained)
    names = []
    for which in ("step-00000003", "step-00000006"):
        engine = apply.restore_for_use(Growing(), trained.config, alone(), out / "checkpoints" / which)
        names.append({name for name, _ in engine.model.named_children()})
    assert names == [{"body", "head", "extra0"}, {"body", "head", "extra0", "extra1"}]


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"batch_cost": 200.0}, {"eval_batch": 5}, {"eval_batch": 1}])
def test_every_sample_is_predicted_once_and_in_order(tmp_path: Path, settings: dict[str, Any]) -> None:
    out = tmp_path / "run"
    run_ranks(1, train, out, {"steps": 1, "epochs": None})
    lengths = Ragged(37, seed=8).lengths.tolist()
    expected = [(index, [index, length]) for index, length in enumerate(lengths)]
    for size in SIZES:
        first, *others = run_ranks(size, predict, out, settings)
        assert first == expected
        assert others == [[]] * (size - 1)


def test_predictions_are_the_models_own_and_gradients_stay_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = opened(Valued(), out, epochs=1)
    loop.train(trained)
    x, _ = points(9, seed=4).tensors
    net = Net()
    net.load_state_dict(trained.stepper.model.state_dict())
    found = apply.predict_run(Valued(), trained.config, alone(), out, "last", points(9, seed=4))
    for number, (index, value) in enumerate(found):
        assert torch.is_grad_enabled()
        assert index == number
        assert float(value) == pytest.approx(net(x[index : index + 1]).item(), rel=1e-5)
    assert number == 8


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda model, grain: model(grain.x).sum(), r"a tensor of shape \(\) for 7 samples"),
        (lambda model, grain: model(grain.x)[1:], r"a tensor of shape \(6,\) for 7 samples"),
        (lambda model, grain: [1, 2], "a list of 2 for 7 samples"),
        (lambda model, grain: (1,) * 7, "a tuple for 7 samples"),
    ],
)
def test_predictions_that_cannot_be_told_apart(tmp_path: Path, returned: Any, words: str) -> None:
    class Odd(SmallTask):
        def predict(self, model: nn.Module, grain: Grain) -> Any:
            return returned(model, grain)

    out = tmp_path / "run"
    trained = opened(Odd(), out, steps=1)
    loop.train(trained)
    with pytest.raises(TaskContract, match=words):
        list(apply.predict_run(Odd(), trained.config, alone(), out, "last"))


# -- what is not there -------------------------------------------------------------------------------------------------


class Bare(SmallTask):
    def val_data(self) -> Mapping[str, Any]:
        return {}

    def predict(self, model: nn.Module, grain: Grain) -> Any:
        return model(grain.x)


def test_missing_things_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, link = tmp_path / "run", alone()
    trained = opened(Bare(), out, epochs=2, keep_last=9)
    loop.train(trained)

    def use(task: Task, folder: Path = out, which: apply.Which = "last") -> None:
        apply.evaluate_run(task, trained.config, link, folder, which)

    with pytest.raises(apply.NoRun, match="there is no such folder"):
        use(Bare(), tmp_path / "absent")
    with pytest.raises(apply.NoRun, match="it has files but no run.json"):
        use(Bare(), out / "checkpoints")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/model.safetensors").touch()
    with pytest.raises(apply.NoRun) as exported:
        use(Bare(), tmp_path / "exported")
    assert exported.value.hint.startswith("it is an export")
    assert apply.find_checkpoint(out, "best").name == "step-00000006"
    assert (
        f"no checkpoint of {out} has a validation score: taking the last one, step-00000006" in capsys.readouterr().err
    )
    names: tuple[str | Path, ...] = ("step-9", Path("step-9"))
    for name in names:
        with pytest.raises(apply.NoCheckpoint, match="step-9 is not a checkpoint") as other:
            use(Bare(), which=name)
        assert other.value.hint.endswith("step-00000006, step-00000003")
    assert apply.find_checkpoint(out, "step-00000003") == out / "checkpoints/step-00000003"
    with pytest.raises(InvalidSetting, match="`average` is 0"):
        apply.read_weights(apply.find_checkpoint(out, "last"), 0)
    with pytest.raises(TaskContract, match="Bare has no validation sets"):
        use(Bare())
    with pytest.raises(TaskContract, match="Bare has neither"):
        apply.predict_run(Bare(), trained.config, link, out, "last")
    with pytest.raises(TaskContract, match="SmallTask has no `predict`"):
        apply.predict_run(SmallTask(), trained.config, link, out, "last")

    weights = out / "checkpoints" / "step-00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"........")
    assert apply.choose_checkpoint(link, out, "last").name == "step-00000003"
    assert "skipped a broken checkpoint" in capsys.readouterr().err
    (out / "checkpoints" / "step-00000003" / "state.json").write_text("{")
    with pytest.raises(apply.NoCheckpoint, match="no sound checkpoint"):
        use(Bare())
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(apply.NoCheckpoint, match="has no checkpoint"):
        use(Bare())


# -- what is predicted -------------------------------------------------------------------------------------------------


class Reading(Valued, ReadsInputs):
    """Predicts points that words on the command line name by their seeds."""

    def read_inputs(self, words: Sequence[str]) -> Any:
        self.say(f"reading {len(words)}")
        return ConcatDataset([points(3, seed=int(word)) for word in words])


def test_a_task_reads_what_is_named_and_others_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, link = tmp_path / "run", alone()
    trained = opened(Reading(), out, epochs=1)
    loop.train(trained)
    capsys.readouterr()
    task = Reading()
    apply.attach(task, trained.config, link)
    data = task.read_inputs(["9", "7"])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "reading 2\n")  # beside the results, not between them
    found = list(apply.predict_run(task, trained.config, link, out, "last", data))
    x = torch.cat([points(3, seed=9).tensors[0], points(3, seed=7).tensors[0]])
    with torch.no_grad():
        expected = trained.stepper.model(x)
    assert [index for index, _ in found] == list(range(6))
    assert torch.allclose(torch.stack([value for _, value in found]), expected, rtol=1e-6)
    with pytest.raises(TaskContract, match="task Valued cannot read a.wav b.wav"):
        read_inputs(Valued(), ["a.wav", "b.wav"])


# -- modes -------------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(mode: Mode, out: Path | None, **settings: Any) -> Any:
    plain = {"global_batch": 8, "order": "none", "level": 0, "workers": 0, "epochs": 2}
    return fit(Valued(), mode=mode, out=out, **{**plain, **settings})


def test_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    result = run("train_eval", out, keep_last=9)
    assert (result.mode, result.status, len(logged(out))) == ("train_eval", "finished", 2)
    before = contents(out)

    for which in ({}, {"resume": "auto"}, {"resume": out / "checkpoints" / "step-00000003"}):
        found = run("eval", out, **which)
        assert (found.mode, found.status) == ("eval", "evaluated")
        assert found.metrics == logged(out)[found.num_steps]
    assert found.num_steps == 3
    assert contents(out) == before
    assert run("eval", None, resume=out / "checkpoints" / "step-00000006").metrics == result.metrics
    assert contents(out) == before

    capsys.readouterr()
    found = run("infer", out)
    assert (found.mode, found.status, found.predictions) == ("infer", "predicted", out / "predictions.jsonl")
    assert f"7 predictions in {out}/predictions.jsonl" in capsys.readouterr().out
    lines = [json.loads(line) for line in found.predictions.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(7))
    assert contents(out).keys() - before.keys() == {"predictions.jsonl"}

    with pytest.raises(InvalidSetting, match="`mode` is 'evaluate'"):
        run("evaluate", out)  # type: ignore[arg-type]
    with pytest.raises(apply.NoRun, match="not said of which run"):
        run("eval", None)
    with pytest.raises(apply.NoRun, match="there is no such folder"):
        run("eval", tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Asked(Valued):
    """Writes down what it is attached for."""

    def __init__(self) -> None:
        super().__init__()
        self.purposes: list[str] = []

    def model(self) -> nn.Module:
        self.purposes.append(self.purpose)
        return super().model()


def test_a_task_knows_what_it_is_attached_for(tmp_path: Path) -> None:
    out, task, link = tmp_path / "run", Asked(), alone()
    trained = opened(task, out, epochs=1)
    loop.train(trained)
    apply.evaluate_run(task, trained.config, link, out, "last")
    list(apply.predict_run(task, trained.config, link, out, "last"))
    assert task.purposes == ["train", "eval", "infer"]


def test_training_without_validation_does_not_look_at_validation_sets(tmp_path: Path) -> None:
    class Blind(SmallTask):
        def val_data(self) -> Mapping[str, Any]:
            raise AssertionError("nobody validates")

    out = tmp_path / "run"
    result = loop.train(opened(Blind(), out, epochs=2, validation=False))
    assert (result.mode, result.metrics, logged(out)) == ("train", {}, {})
