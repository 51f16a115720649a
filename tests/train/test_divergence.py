"""Runs that diverge end as such, and healthy ones do not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cli.main import main
from paceline.core.run_folder import read_record
from paceline.observe.report.runs import read_run
from paceline.train.divergence import EpochLosses, LossWatch, judge_skips, judge_weights
from paceline.train.loop import train
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.small import SmallTask, opened

DIGITS = ["train", "digits", "--device", "cpu", "--threads", "1", "--workers", "0"]

# -- the decision ------------------------------------------------------------------------------------------------------


def verdict(losses: list[float], *, is_over: bool = False, max_ratio: float | None = 1e4, began: int = 0) -> str | None:
    watch = LossWatch(max_ratio)
    watch.note(enumerate(losses), began)
    return watch.verdict(len(losses), is_over=is_over)


def test_a_loss_that_stays_huge_is_a_verdict() -> None:
    assert verdict([2.3] + [1e20] * 9) is None
    assert verdict([2.3] + [1e20] * 10) == (
        "the loss is 1e+20, after 2.3 at first, more than `--max-loss-ratio` (10000) allows"
    )
    assert verdict([2.3] + [-1e20] * 10) is not None
    assert verdict([2.3] + [1e20] * 10, max_ratio=None) is None


def test_the_end_of_a_short_run_is_judged_by_half_of_it() -> None:
    assert verdict([2.3, 1e20, 1e19, 5.8e20], is_over=True) is not None
    assert verdict([2.3, 1.0, 0.9, 1e20], is_over=True) is None


@pytest.mark.parametrize(
    "losses",
    [
        [2.3, 1.0, 1e9, 0.9] * 20,  # spikes that pass
        [1e-7] + [3.0] * 40,  # a trained model that meets another task
        [1e6] + [1e9] * 40,  # sums over batches of any size
        [2.3] + [math.inf, 1.5] * 40,  # CTC on utterances that are too short: skipped, one by one
        [2.3] + [9e3] * 40,
    ],
)
def test_healthy_losses_are_none(losses: list[float]) -> None:
    assert verdict(losses) is None
    assert verdict(losses, is_over=True) is None


def test_each_stage_has_a_first_loss() -> None:
    losses = [0.5] * 10 + [1e5] * 30
    assert verdict(losses) is not None
    assert verdict(losses, began=10) is None, "other data, other scale"


def relapses(losses: list[float], stages: list[str] | None = None) -> list[int]:
    """Return the epochs, from 0, of which something is said."""
    watch = EpochLosses()
    stages = stages or [""] * len(losses)
    return [epoch for epoch, pair in enumerate(zip(stages, losses, strict=True)) if watch.note(*pair) is not None]


def test_a_loss_that_climbs_back_to_where_it_began_is_told_once() -> None:
    """The losses of a FastConformer at too high a rate, by ten epochs: it fell for 37 epochs and never recovered."""
    run = [481.0, 323, 222, 166, 147, 192, 462, 456, 432, 430]
    assert relapses(run) == [6]
    watch = EpochLosses()
    said = [watch.note(None, loss) for loss in run]
    assert said[6] == "the loss is 462, after 147 at best and 481 in the first epoch"
    assert relapses([*run, 140, 460]) == [6, 11]  # it had recovered in between
    assert relapses([*run[:5], math.nan]) == [5]


def test_losses_that_rise_a_little_or_never_fell_are_not() -> None:
    assert relapses([10.0, 9, 8, 7, 8, 7.5]) == []
    assert relapses([10.0, 9.5, 11, 12]) == []
    assert relapses([1.0, 0.1, 1.0, 0.1], ["a", "a", "b", "b"]) == []  # another stage begins anew
    assert relapses([-1.0, -2.0, -0.9]) == [2]
    assert relapses([5.0]) == relapses([math.nan, 5.0, 4.0]) == []


def test_skipped_steps() -> None:
    assert judge_skips(3, 4) is None, "a loss scale that settles"
    assert judge_skips(10, 20) is None
    assert judge_skips(11, 20) == "11 of 20 steps were skipped: their gradients were not finite"


def test_weights_are_named() -> None:
    assert judge_weights([]) is None
    assert judge_weights(list("abcde")) == "weights are not finite: a, b, c and 2 more"


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_learning_rate_that_is_far_too_high(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main([*DIGITS, "--epochs", "8", "--lr", "1e9", "--optimizer", "sgd", "--out", str(out)]) == 3
    shown = capsys.readouterr().out
    assert "diverged after step 20: the loss is" in shown
    assert "lower `--lr`" in shown
    assert read_record(out).status == "diverged"
    assert len((out / "metrics.jsonl").read_text().splitlines()) >= 20
    assert not list((out / "checkpoints").glob("step-*"))
    assert main(["runs", str(tmp_path)]) == 0
    assert "diverged" in capsys.readouterr().out
    assert read_run(out).standing.startswith("diverged")
    again = [*DIGITS, "--epochs", "8", "--lr", "1e-3", "--optimizer", "sgd", "--out", str(out)]
    for words, said in (([], "holds a run already"), (["--resume", "auto"], "--allow-change")):
        assert main([*again, *words]) == 2, "nothing of it is written over without a word"
        assert said in capsys.readouterr().err
    assert len((out / "metrics.jsonl").read_text().splitlines()) >= 20
    assert main(["eval", str(out)]) == 2
    assert "no checkpoint" in capsys.readouterr().err


class Unlearning(SmallTask):
    """Its third epoch of three steps forgets: the weights are as far from the data as they began, and stay there."""

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        if step.number >= 8:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(3.0)


def test_a_run_that_forgets_says_so_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"epochs": 6, "lr": 0.02, "loggers": (), "progress": "lines", "validation": False}
    trained = opened(Unlearning(), tmp_path / "run", **settings)
    assert train(trained).status == "finished"
    said = [line for line in capsys.readouterr().out.splitlines() if "unlearned" in line]
    assert len(said) == 1
    assert "at best" in said[0]
    assert "`--lr`" in said[0]


class Overflowing(SmallTask):
    """From a step on, its update takes a weight to infinity."""

    def __init__(self, at_step: int) -> None:
        super().__init__()
        self.at_step = at_step

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        if step.number == self.at_step:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = math.inf


def overflow(link: Link, out: str, at_step: int, settings: dict[str, Any]) -> list[Any]:
    trained = opened(Overflowing(at_step), Path(out), link, grains=2, loggers=(), progress="none", **settings)
    result = train(trained)
    return [result.status, result.num_steps]


@pytest.mark.parametrize(("size", "more"), [(1, {}), (2, {}), (2, {"reduce": "param", "sync_step": 1})])
def test_weights_that_are_not_finite_are_never_saved(size: int, more: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    answers = run_ranks(size, overflow, str(out), 4, {"epochs": 3, **more})
    assert answers == [["diverged", 6]] * size, "the same verdict on all ranks, when the second epoch is saved"
    assert read_record(out).status == "diverged"
    assert [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith("step-")] == ["step-00000003"]


def test_a_resume_of_a_diverged_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    train(opened(Overflowing(4), out, epochs=3))
    capsys.readouterr()
    result = train(opened(SmallTask(), out, epochs=3, resume="auto"))
    shown = capsys.readouterr().out
    assert "this run had diverged: it goes on from what it saved before" in shown
    assert "resumed after step 3" in shown
    assert result.status == "finished"
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


class NeverFinite(SmallTask):
    def loss(self, model: nn.Module, grain: Any) -> Any:
        total, count = super().loss(model, grain)
        return (total * math.nan if model.training and len(self.seen) > 2 else total), count


def test_too_many_steps_in_a_row_are_divergence_too(tmp_path: Path) -> None:
    from paceline.train.loss import TooManySkipped

    trained = opened(NeverFinite(), tmp_path / "run", epochs=30)
    with pytest.raises(TooManySkipped) as failure:
        train(trained)
    assert failure.value.exit_code == 3
    assert read_record(tmp_path / "run").status == "diverged"
