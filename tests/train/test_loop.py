"""The loop on one rank against loops written by hand: how long, in which order, what is looked at, what is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.config.settings import GroupSettings, TrainConfig
from paceline.core.errors import PacelineError
from paceline.observe.callback import RunInfo, Watcher
from paceline.observe.journal import read
from paceline.train.apply import evaluate_run
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint import writer
from paceline.train.checkpoint.format import listed, step_of
from paceline.train.checkpoint.writer import CheckpointFailed
from paceline.train.evaluation import NotASet
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.train.task import HasLengths, Reports
from paceline.train.validate import UnknownMonitor
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.ragged import Net as RaggedNet
from tests.train.ragged import Ragged, RaggedTask
from tests.train.small import (
    BATCH,
    LR,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    Net,
    ScoredTask,
    SmallTask,
    alone,
    assert_same,
    fresh_net,
    opened,
    points,
    raw_steps,
    sgd,
    squares,
    weights,
)

# -- how long, in which order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(2, None, 6), (None, 5, 5), (2, 4, 4), (2, 100, 6)],
)
def test_ends_with_epochs_or_steps_as_a_plain_loop_does(
    tmp_path: Path, epochs: int | None, steps: int | None, expected: int
) -> None:
    ours = opened(SmallTask(), tmp_path / "run", epochs=epochs, steps=steps)
    result = train(ours)
    model = fresh_net()
    losses = list(raw_steps(model, sgd(model), expected))
    assert (result.status, result.num_steps) == ("finished", expected)
    records = read(tmp_path / "run" / "metrics.jsonl")
    assert [record["loss"] for record in records] == losses
    assert [record["step"] for record in records] == list(range(expected))
    assert [record["epoch"] for record in records] == [1 + step // STEPS_PER_EPOCH for step in range(expected)]
    assert result.loss == losses[-1]
    assert_same(weights(ours), model.state_dict())


def test_sub_epochs_share_one_pass() -> None:
    task = SmallTask()
    train(opened(task, None, epochs=6, partition_epoch=3, global_batch=100, order="random"))
    assert [len(samples) for samples in task.seen] == [6, 7, 7] * 2  # bounds 20 k / 3, rounded down
    first, second = [sum(task.seen[begin : begin + 3], []) for begin in (0, 3)]
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES))
    assert first != second, "another pass has another order"


def test_batches_by_cost_in_sorted_order() -> None:
    class Recorded(RaggedTask):
        seen: list[list[int]] = []  # noqa: RUF012

        def loss(self, model: nn.Module, grain: Any) -> Any:
            if model.training:
                self.seen.append(grain.samples.tolist())
            return super().loss(model, grain)

    task = Recorded()
    train(opened(task, None, epochs=1, order="sorted", global_batch=12, batch_cost=200.0))
    lengths = Ragged().lengths
    expected: list[list[int]] = [[]]
    for sample in np.argsort(lengths, kind="stable").tolist():
        grown = [*expected[-1], sample]
        if len(grown) > 12 or len(grown) * max(lengths[grown]) > 200:
            expected.append([sample])
        else:
            expected[-1] = grown
    assert [sorted(samples) for samples in task.seen] == [sorted(samples) for samples in expected]


def test_limited_batches(tmp_path: Path) -> None:
    task = SmallTask()
    ours = opened(task, tmp_path / "run", epochs=2, limit_batches=2, eval_batch=3)
    result = train(ours)
    assert task.seen == [list(range(8)), list(range(8, 16))] * 2
    x, y = points(7, seed=2).tensors
    model = ours.stepper.model
    with torch.no_grad():
        expected = float(squares(model, x[:3], y[:3]) + squares(model, x[3:6], y[3:6])) / 6
    assert result.metrics["dev/loss"] == pytest.approx(expected, rel=1e-6)


def test_a_batch_larger_than_the_data_is_one_short_batch_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    task = SmallTask()
    result = train(opened(task, None, steps=1, global_batch=64))
    x, y = points(NUM_SAMPLES, seed=1).tensors
    with torch.no_grad():
        assert result.loss == pytest.approx(float((fresh_net()(x) - y).square().mean()), rel=1e-6)
    assert task.seen == [list(range(NUM_SAMPLES))]
    assert "the batch of 64 is larger than the data: one step of 20" in capsys.readouterr().out


def test_a_batch_smaller_than_a_sample_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = Ragged().lengths
    cost = float(np.median(lengths))
    longer = sum(length > cost for length in lengths)
    assert 1 < longer < len(lengths)
    train(opened(RaggedTask(), None, epochs=1, global_batch=None, batch_cost=cost))
    said = capsys.readouterr().out
    assert f"{longer} of {len(lengths)} samples are longer than the batch of {cost:g} (`batch_cost`): a step of" in said
    train(opened(RaggedTask(), None, epochs=1, global_batch=None, batch_cost=float(max(lengths))))
    assert "are longer than" not in capsys.readouterr().out


# -- looking -----------------------------------------------------------------------------------------------------------


def plain_metrics(model: nn.Module, eval_batch: int) -> dict[str, float]:
    found = {}
    for name, data in SmallTask().val_data().items():
        x, y = data.tensors
        with torch.no_grad():
            errors = (model(x.to(next(model.parameters()).dtype)) - y).square().double()
        parts = [errors[begin : begin + eval_batch] for begin in range(0, len(y), eval_batch)]
        found[f"{name}/loss"] = float(errors.sum()) / len(y)
        found[f"{name}/far"] = sum(float(part.sum() > len(part)) for part in parts) / len(parts)
    return found


def test_validation_every_steps_and_epochs(tmp_path: Path) -> None:
    train(opened(SmallTask(), tmp_path / "run", epochs=2, val_every_steps=2, val_every_epochs=1, eval_batch=3))
    model = fresh_net()
    expected = {}
    for step, _ in enumerate(raw_steps(model, sgd(model), 6)):
        if step + 1 in (2, 3, 4, 6):
            expected[step] = plain_metrics(model, 3)
    records = read(tmp_path / "run" / "metrics.jsonl", "validation")
    assert [record["step"] for record in records] == list(expected), "each moment is looked at once"
    for record in records:
        found = {name: value for name, value in record.items() if "/" in name}
        assert found == pytest.approx(expected[record["step"]], rel=1e-5)


def test_validation_at_one_moment_counts_once_for_patience() -> None:
    """The last step of an epoch is due for both; the second look at the same weights is not a worse one."""
    ours = opened(ScoredTask([3.0, 2.0, 1.0]), None, epochs=3, val_every_steps=3, patience=1, monitor="dev/score")
    assert train(ours).status == "finished"


def kept_steps(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in listed(folder / "checkpoints"))


@pytest.mark.parametrize(
    ("mode", "keep_last", "keep_best", "kept", "best"),
    [("max", 2, 1, [6, 12, 15], 6), ("min", 1, 1, [3, 15], 3), ("max", 1, 2, [6, 15], 6), ("max", 1, 0, [15], 15)],
)
def test_the_last_and_the_best_are_kept(
    tmp_path: Path, mode: Any, keep_last: int, keep_best: int, kept: list[int], best: int
) -> None:
    settings = {"monitor": "dev/score", "monitor_mode": mode, "keep_last": keep_last, "keep_best": keep_best}
    result = train(opened(ScoredTask([1.0, 5.0, 2.0, 3.0, 4.0]), tmp_path / "run", epochs=5, **settings))
    assert kept_steps(tmp_path / "run") == kept
    found = restore.best(tmp_path / "run" / "checkpoints").checkpoint
    assert found is not None
    assert found.step == best
    assert result.best_score == (5.0 if mode == "max" else 1.0)


def test_the_best_moment_is_saved_and_no_other_weights_pass_for_it(tmp_path: Path) -> None:
    """Looked at after 2, 4, 6, 8 steps, saved after 3, 6: a score belongs to the weights it was measured on."""
    scores = [5.0, 1.0, 7.0, 6.0]  # after 2, 4, 6, 8 steps
    settings = {"val_every_steps": 2, "val_every_epochs": None, "save_every_steps": 3, "save_every_epochs": None}
    train(opened(ScoredTask(scores), tmp_path / "run", steps=8, monitor="dev/score", keep_last=1, **settings))
    found = restore.best(tmp_path / "run" / "checkpoints").checkpoint
    assert found is not None
    assert (found.step, found.score) == (4, 1.0)
    model = fresh_net()
    list(raw_steps(model, sgd(model), 4))
    assert_same(found.parts["model"], model.state_dict())


@pytest.mark.parametrize(("monitor", "nearest"), [("dev/los", "dev/loss"), ("tets/loss", "test/loss")])
def test_an_unknown_monitor_is_answered_with_the_nearest(monitor: str, nearest: str) -> None:
    with pytest.raises(UnknownMonitor) as caught:
        train(opened(SmallTask(), None, epochs=1, monitor=monitor))
    assert repr(monitor) in str(caught.value)
    assert caught.value.hint == f"did you mean `--monitor {nearest}`?"


def test_a_misspelt_monitor_loses_no_step(tmp_path: Path) -> None:
    """Metrics are known after the first validation: the run goes on from there with the right name."""
    undisturbed = opened(ScoredTask([3.0, 2.0]), None, epochs=2, monitor="dev/score")
    train(undisturbed)
    with pytest.raises(UnknownMonitor):
        train(opened(ScoredTask([3.0]), tmp_path / "run", epochs=2, monitor="dev/scoer"))
    resumed = opened(ScoredTask([2.0]), tmp_path / "run", epochs=2, monitor="dev/score", resume="auto")
    assert resumed.stepper.num_steps == STEPS_PER_EPOCH
    train(resumed)
    assert_same(resumed.stepper.model.state_dict(), undisturbed.stepper.model.state_dict())


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"val_every_epochs": 1}, 4 * STEPS_PER_EPOCH), ({"val_every_epochs": None, "val_every_steps": 1}, 4)],
)
def test_patience_ends_after_so_many_validations_without_a_better_one(settings: Any, steps: int) -> None:
    task = ScoredTask([3.0, 2.0, 2.0, 2.5, 1.0])
    result = train(opened(task, None, epochs=10, patience=2, monitor="dev/score", **settings))
    assert (result.status, result.num_steps, result.best_score) == ("early", steps, 2.0)


# -- looking at the end ------------------------------------------------------------------------------------------------

RARELY = {"val_every_epochs": 5, "monitor": "dev/score"}


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 4}, {"steps": 6}, {"epochs": 2, "ema": 0.9}])
def test_a_run_validates_at_its_end(tmp_path: Path, length: dict[str, Any]) -> None:
    """No interval asks for it; the score is in the last checkpoint, the best one and the result."""
    run = tmp_path / "run"
    ours = opened(ScoredTask([7.0]), run, **RARELY, **length)
    result = train(ours)
    assert (result.metrics["dev/score"], result.best_score, result.status) == (7.0, 7.0, "finished")
    assert [record["step"] + 1 for record in read(run / "metrics.jsonl", "validation")] == [result.num_steps]
    found = restore.best(run / "checkpoints").checkpoint
    assert found is not None
    assert (found.step, found.score) == (result.num_steps, 7.0)
    again = train(opened(ScoredTask([]), run, resume="auto", **RARELY, **length))
    assert (again.num_steps, again.best_score) == (result.num_steps, 7.0)


@pytest.mark.parametrize("settings", [{"val_at_end": False}, {"validation": False}, {"val_at_end": False, "steps": 4}])
def test_no_validation_at_the_end_if_told_so(tmp_path: Path, settings: dict[str, Any]) -> None:
    result = train(opened(ScoredTask([]), tmp_path / "run", epochs=2, **RARELY, **settings))
    assert (result.metrics, result.best_score) == ({}, None)
    assert not read(tmp_path / "run" / "metrics.jsonl", "validation")


def test_the_last_step_is_validated_once(tmp_path: Path) -> None:
    """Due by steps, by epochs and by the end: one look."""
    settings = {"val_every_steps": 3, "val_every_epochs": 1, "monitor": "dev/score"}
    assert train(opened(ScoredTask([3.0, 2.0]), None, epochs=2, **settings)).best_score == 2.0


class StoppedAtItsEnd(ScoredTask, Reports):
    """A signal after the last step, when the loop looks no more."""

    stop: Callable[[], None] | None = None

    def report(self) -> None:
        if self.stop is not None:
            self.stop()


def test_a_signal_before_the_validation_at_the_end_is_heeded(tmp_path: Path) -> None:
    """Nobody who asks for an end waits for a long validation; it is made up for when the run goes on."""
    task = StoppedAtItsEnd([])
    ours = opened(task, tmp_path / "run", epochs=1, **RARELY)
    task.stop = ours.ask_to_stop
    assert (train(ours).status, kept_steps(tmp_path / "run")) == ("stopped", [STEPS_PER_EPOCH])
    on = opened(StoppedAtItsEnd([4.0]), tmp_path / "run", epochs=1, resume="auto", **RARELY)
    result = train(on)
    assert (result.status, result.num_steps, result.best_score) == ("finished", STEPS_PER_EPOCH, 4.0)


def look_at_end(link: Link, out: Path, settings: dict[str, Any]) -> tuple[Any, ...]:
    task = RaggedTask()
    result = train(opened(task, out, link, epochs=2, grains=2, val_every_epochs=5, **settings))
    return result.metrics, result.best_score


@pytest.mark.parametrize("settings", [{}, {"reduce": "param", "sync_step": 4}, {"shard": "full"}, {"ema": 0.9}])
def test_two_ranks_validate_at_their_end(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Also where they step apart until the end, or hold pieces only; what `eval` finds is the same."""
    first, second = run_ranks(2, look_at_end, tmp_path / "run", settings)
    assert first == second
    found = restore.best(tmp_path / "run" / "checkpoints").checkpoint
    assert found is not None
    assert found.score == first[1]
    config = TrainConfig(**json.loads((tmp_path / "run" / "run.json").read_text())["settings"])
    again = evaluate_run(RaggedTask(), config, alone(), tmp_path / "run")
    assert again == pytest.approx(first[0], rel=1e-6)


class FailsAtItsEnd(ScoredTask):
    def metrics(self, model: nn.Module, grain: Any) -> Mapping[str, Any]:
        raise RuntimeError("damaged validation data")


def test_a_validation_that_fails_at_the_end_loses_no_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="damaged"):
        train(opened(FailsAtItsEnd([]), tmp_path / "run", epochs=2, save_every_epochs=None, **RARELY))
    result = train(opened(ScoredTask([4.0]), tmp_path / "run", epochs=2, resume="auto", **RARELY))
    assert (result.num_steps, result.best_score) == (6, 4.0)


@pytest.mark.parametrize("more", [{"schedule": "newbob", "decay": 0.5}, {"patience": 2}])
def test_a_look_at_the_end_changes_nothing_for_a_run_that_is_given_more(tmp_path: Path, more: dict[str, Any]) -> None:
    """Ended after 3 epochs and given 6, or 6 at once: learning rates, patience and weights are the same."""
    settings = {"val_every_epochs": 2, "monitor": "dev/score", **more}
    at_once = opened(ScoredTask([3.0, 2.0, 1.0]), tmp_path / "at once", epochs=6, **settings)
    whole = train(at_once)
    first = train(opened(ScoredTask([3.0, 1.5]), tmp_path / "run", epochs=3, **settings))
    assert first.best_score == 1.5
    goes_on = {"resume": "auto", "allow_change": True}  # of the epochs, which a schedule may depend on
    on = opened(ScoredTask([2.0, 1.0]), tmp_path / "run", epochs=6, **goes_on, **settings)
    result = train(on)
    assert (result.status, result.num_steps, result.best_score) == (whole.status, whole.num_steps, whole.best_score)
    rates = [[record["lr"] for record in read(tmp_path / name / "metrics.jsonl")] for name in ("run", "at once")]
    assert rates[0] == rates[1]
    assert_same(weights(on), weights(at_once))


# -- opening -----------------------------------------------------------------------------------------------------------


class CannotStart(Watcher):
    """As a logger whose server does not answer."""

    def start(self, info: RunInfo) -> None:
        raise ConnectionError("no server")


class Started(Watcher):
    """Remembers how it was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def end(self, status: str) -> None:
        self.ended.append(status)


def test_a_run_that_cannot_open_leaves_nothing_that_blocks_a_retry(tmp_path: Path) -> None:
    """A logger that fails to start: the same folder can be used at once, by the same process."""
    settings = {"global_batch": BATCH, "level": 0, "workers": 0, "steps": 2}
    config = TrainConfig(out=tmp_path / "run", **settings)
    before, after, threads = Started(), Started(), threading.active_count()
    with pytest.raises(ConnectionError, match="no server"):
        open_run(SmallTask(), config, alone(), [before, CannotStart(), after])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert (before.ended, after.ended) == (["failed"], []), "only what has started is ended"
    assert threading.active_count() == threads
    assert train(open_run(SmallTask(), config, alone())).status == "finished"


def test_a_run_whose_checkpoints_cannot_be_kept_is_not_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(writer, "sync", refuse)
        with pytest.raises(CheckpointFailed, match="cannot be kept here"):
            opened(SmallTask(), tmp_path / "run", steps=2)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert train(opened(SmallTask(), tmp_path / "run", steps=2)).status == "finished"


# -- what is trained ---------------------------------------------------------------------------------------------------


def test_frozen_weights_stay_and_groups_follow_the_formula() -> None:
    """One step of plain SGD: w - lr * lr_scale * (gradient + weight_decay * w)."""
    groups = (GroupSettings(match="head.weight", lr_scale=0.5, weight_decay=0.2), GroupSettings(match="h*", lr_scale=3))
    ours = opened(
        SmallTask(), None, steps=1, freeze=("body.b*",), groups=groups, momentum=0.0, weight_decay=0.1, precision="fp64"
    )
    train(ours)
    model = fresh_net().double()
    x, y = points(NUM_SAMPLES, seed=1).tensors
    (squares(model, x[:BATCH].double(), y[:BATCH]) / BATCH).backward()
    factors = {"body.weight": (1.0, 0.1), "head.weight": (0.5, 0.2), "head.bias": (3.0, 0.1)}
    trained = weights(ours)
    for name, parameter in model.named_parameters():
        if name == "body.bias":
            assert torch.equal(trained[name], parameter)
            continue
        scale, decay = factors[name]
        assert parameter.grad is not None
        expected = parameter - LR * scale * (parameter.grad + decay * parameter)
        assert torch.allclose(trained[name], expected.detach(), rtol=1e-13, atol=1e-15), name


class CountedDropout(nn.Dropout):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountedDropout.calls += self.training
        return super().forward(x)


class CountedTask(RaggedTask):
    def model(self) -> nn.Module:
        net = RaggedNet()
        net.drop = CountedDropout(0.3)
        return net


def test_checkpointed_activations_change_nothing_but_the_work() -> None:
    trained, calls = [], []
    for patterns in ((), ("norm", "drop")):
        CountedDropout.calls = 0
        ours = opened(CountedTask(), None, steps=6, grains=2, global_batch=24, checkpoint_activations=patterns)
        train(ours)
        trained.append(weights(ours))
        calls.append(CountedDropout.calls)
    assert_same(*trained)
    assert calls == [12, 24], "the second time each forward is run again in backward"


def test_the_average_is_that_of_a_plain_loop_and_is_what_validation_sees() -> None:
    ours = opened(SmallTask(), None, steps=7, ema=0.75, precision="fp64")
    result = train(ours)
    model = fresh_net().double()
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in raw_steps(model, sgd(model), 7, dtype=torch.float64):
        for name, parameter in model.named_parameters():
            average[name] = 0.75 * average[name] + 0.25 * parameter.detach()
    assert ours.stepper.prepared.average is not None
    for name, tensor in ours.stepper.prepared.average.tensors.items():
        assert torch.allclose(tensor, average[name], rtol=1e-13, atol=1e-15), name
    assert_same(weights(ours), model.state_dict())
    without = plain_metrics(model, BATCH)["dev/loss"]
    model.load_state_dict(average)
    expected = plain_metrics(model, BATCH)["dev/loss"]
    assert result.metrics["dev/loss"] == pytest.approx(expected, rel=1e-12)
    assert result.metrics["dev/loss"] != pytest.approx(without, rel=1e-3)


def test_init_from_names_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("nowhere", "there is no such file or folder"), ("file", "it is not a checkpoint")):
        with pytest.raises(PacelineError, match=f"--init-from .*{name}: {why}"):
            train(opened(SmallTask(), None, steps=1, init_from=tmp_path / name))
    with pytest.raises(PacelineError, match=r"https:/user:\*+@host/x.*: a password in an address"):
        train(opened(SmallTask(), None, steps=1, init_from=Path("https://user:password@host/x")))


def test_init_from_takes_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class WiderHead(SmallTask):
        def model(self) -> nn.Module:
            net = Net()
            net.head = nn.Linear(6, 3)
            return net

        def loss(self, model: nn.Module, grain: Any) -> Any:
            return (model.head(torch.tanh(model.body(grain.x))).sum(1) - grain.y).square().sum(), len(grain)

    first = opened(SmallTask(), tmp_path / "first", steps=3)
    train(first)
    found = restore.newest(tmp_path / "first" / "checkpoints").checkpoint
    assert found is not None
    capsys.readouterr()
    second = opened(WiderHead(), tmp_path / "second", steps=3, init_from=found.path)
    torch.manual_seed(0)
    Net()
    head = nn.Linear(6, 3)
    state = weights(second)
    train(second)
    assert_same(
        {name: state[name] for name in state if "body" in name},
        {name: tensor for name, tensor in weights(first).items() if "body" in name},
    )
    assert_same({"weight": state["head.weight"], "bias": state["head.bias"]}, head.state_dict())
    said = capsys.readouterr().out
    assert f"2 weights from {found.path}" in said
    assert "2 new: head.weight, head.bias" in said


class Sets(SmallTask):
    def __init__(self, sets: Mapping[str, Any]) -> None:
        super().__init__()
        self._sets = sets

    def val_data(self) -> Mapping[str, Any]:
        return self._sets


@pytest.mark.parametrize(("data", "words"), [([], "'dev' is empty"), (iter("ab"), "'dev' is a str_ascii_iterator")])
def test_a_validation_set_that_cannot_be_cut_is_named(data: Any, words: str) -> None:
    with pytest.raises(NotASet, match=words):
        opened(Sets({"dev": data}), None, epochs=1)


def test_a_validation_set_without_a_name_gets_one() -> None:
    with pytest.raises(NotASet, match="is a list, not {name: data set}") as refused:
        opened(Sets([1, 2]), None, epochs=1)  # type: ignore[arg-type]
    assert '`return {"dev": data}`' in refused.value.hint


def test_validation_batches_keep_to_the_cost_of_a_grain() -> None:
    class Long(Sets, HasLengths):
        def lengths(self, data: Any) -> Any:
            return np.arange(1, len(data) + 1)

        def metrics(self, model: nn.Module, grain: Any) -> Mapping[str, Any]:
            costs.append(len(grain) * (int(grain.samples.max()) + 1))
            return super().metrics(model, grain)

    costs: list[int] = []
    train(opened(Long({"dev": points(20, seed=3)}), None, epochs=1, batch_cost=120.0, global_batch=None, grains=2))
    assert len(costs) > 2
    assert max(costs) <= 60
