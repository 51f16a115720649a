"""Metrics that are no mean over samples: exact on any number of ranks, compared with one look at all data.

On ce01e4b F1 as a pair was 0.25 where the set's is 0.62, without a word, and there was no other form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.ranks import ranks
from tests.vision import define_operators_of_vision

NUM_SAMPLES = 37
PLAIN: dict[str, Any] = {"epochs": 1, "global_batch": 8, "grains": 4, "level": 0, "workers": 0, "progress": "none"}


def scored() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 1, generator=random)
    return x, (x.squeeze(1) + torch.randn(NUM_SAMPLES, generator=random) > 0).long()


def roc_auc_score(y: torch.Tensor, scores: torch.Tensor) -> float:
    """Share of pairs of a positive and a negative sample that are in the right order."""
    above = scores[y == 1].unsqueeze(1) - scores[y == 0].unsqueeze(0)
    return float(((above > 0).double() + (above == 0).double() / 2).mean())


def f1_score(y: torch.Tensor, guesses: torch.Tensor) -> float:
    return float(2 * (guesses & (y == 1)).sum() / (guesses.sum() + (y == 1).sum()))


class Scored(paceline.Task):
    """A model whose output is its input: what metrics must be is known without training."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return TensorDataset(*scored())

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": TensorDataset(*scored())}

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return model(grain.x).sum() * 0.0, len(grain)


class WithGathered(Scored):
    def metrics(self, model: nn.Module, grain: paceline.Grain) -> Mapping[str, Any]:
        scores = grain.x.squeeze(1)
        words = [f"{score:.1f}" for score in scores.tolist()]
        return {
            "auroc": paceline.Gathered(roc_auc_score, grain.y, scores),
            "positive": (grain.y.sum(), len(grain)),
            "of": paceline.Gathered(both, grain.y, scores, words),
        }


def both(y: torch.Tensor, scores: torch.Tensor, words: list[str]) -> dict[str, Any]:
    x, _ = scored()
    assert words == [f"{score:.1f}" for score in x.squeeze(1).tolist()]  # in the order of the data
    return {"f1": f1_score(y, scores > 0), "num_words": len(set(words)), "by_class": torch.bincount(y)}


@ranks(1, 2, 3)
def test_values_are_gathered_for_one_function(link: Link) -> None:
    x, y = scored()
    result = train(
        open_run(WithGathered(), paceline.TrainConfig(monitor="dev/auroc", monitor_mode="max", **PLAIN), link)
    )
    by_class = ["dev/of_by_class_0", "dev/of_by_class_1"]  # before, the last number of several was all of them
    assert list(result.metrics) == ["dev/auroc", "dev/positive", "dev/of_f1", "dev/of_num_words", *by_class]
    assert [result.metrics[name] for name in by_class] == [float((y == 0).sum()), float((y == 1).sum())]
    assert result.metrics["dev/auroc"] == roc_auc_score(y, x.squeeze(1))
    assert result.metrics["dev/of_f1"] == f1_score(y, x.squeeze(1) > 0)
    assert result.metrics["dev/positive"] == pytest.approx(float(y.double().mean()), abs=1e-15)
    assert result.best_score == result.metrics["dev/auroc"]


class WithTorchmetrics(Scored):
    def __init__(self) -> None:
        import torchmetrics as tm

        kinds = {"f1": tm.classification.BinaryF1Score(), "precision": tm.classification.BinaryPrecision()}
        self.auroc = tm.classification.BinaryAUROC()  # lists that are concatenated
        self.pearson = tm.regression.PearsonCorrCoef()  # a state that is reduced by the metric itself
        self.mean, self.largest = tm.MeanMetric(), tm.MaxMetric()
        self.many = tm.MetricCollection(kinds)
        accuracy = tm.classification.BinaryAccuracy
        self.wrapped = {  # whose states are those of others
            "sum": accuracy() + 1.0,
            "spread": tm.MinMaxMetric(accuracy()),
            "tasks": tm.MultitaskWrapper({"a": accuracy(), "b": tm.MetricCollection(dict(kinds))}),
        }

    def metrics(self, model: nn.Module, grain: paceline.Grain) -> Mapping[str, Any]:
        scores = grain.x.squeeze(1)
        self.auroc.update(scores.sigmoid(), grain.y)
        self.pearson.update(scores, grain.y.float())
        self.mean.update(scores)
        self.largest.update(scores)
        self.many.update(scores.sigmoid(), grain.y)
        self.wrapped["sum"].update(scores.sigmoid(), grain.y)
        self.wrapped["spread"].update(scores.sigmoid(), grain.y)
        each = dict.fromkeys("ab", scores.sigmoid()), dict.fromkeys("ab", grain.y)
        self.wrapped["tasks"].update(*each)
        metrics = {"auroc": self.auroc, "pearson": self.pearson, "mean": self.mean, "largest": self.largest}
        return {**metrics, **self.wrapped, "of": self.many}


@ranks(1, 2)  # each rank imports torchmetrics, which takes seconds
def test_torchmetrics_see_all_batches(link: Link) -> None:
    define_operators_of_vision()
    pytest.importorskip("torchmetrics", reason="comes with the extra `bench`")
    x, y = scored()
    scores = x.squeeze(1)
    metrics = train(open_run(WithTorchmetrics(), paceline.TrainConfig(**PLAIN), link)).metrics
    assert metrics["dev/auroc"] == pytest.approx(roc_auc_score(y, scores), abs=1e-6)
    assert metrics["dev/pearson"] == pytest.approx(float(torch.corrcoef(torch.stack([scores, y]))[0, 1]), abs=1e-6)
    assert metrics["dev/mean"] == pytest.approx(float(scores.mean()), abs=1e-6)
    assert metrics["dev/largest"] == float(scores.max())
    assert metrics["dev/of_f1"] == pytest.approx(f1_score(y, scores > 0), abs=1e-6)
    accuracy = pytest.approx(float(((scores > 0) == y).double().mean()), abs=1e-6)
    assert metrics["dev/sum"] - 1.0 == accuracy  # before, the states of what a metric is made of were lost
    assert metrics["dev/spread_raw"] == accuracy
    assert metrics["dev/tasks_a"] == accuracy
    assert metrics["dev/tasks_b_f1"] == metrics["dev/of_f1"]
    everyone = link.gather_objects(metrics)
    assert all(each == metrics for each in everyone)


@ranks(1)
def test_a_metric_of_the_last_batches_is_refused(link: Link) -> None:
    define_operators_of_vision()
    tm = pytest.importorskip("torchmetrics", reason="comes with the extra `bench`")

    class OfWindow(Scored):
        def metrics(self, model: nn.Module, grain: paceline.Grain) -> Mapping[str, Any]:
            return {"mean": tm.RunningMean(window=2)}

    with pytest.raises(paceline.PacelineError, match="metric 'mean' is a RunningMean, which covers the last batches"):
        train(open_run(OfWindow(), paceline.TrainConfig(**PLAIN), link))


@ranks(1)
def test_a_second_validation_starts_anew(link: Link) -> None:
    define_operators_of_vision()
    pytest.importorskip("torchmetrics", reason="comes with the extra `bench`")
    x, y = scored()
    task = WithTorchmetrics()
    task.auroc.update(torch.tensor([0.9]), torch.tensor([0]))  # by somebody else
    task.metrics(nn.Identity(), paceline.Grain((x, y), 0, torch.arange(len(y)).numpy()))
    metrics = train(open_run(WithTorchmetrics(), paceline.TrainConfig(**{**PLAIN, "epochs": 2}), link)).metrics
    assert metrics["dev/auroc"] == pytest.approx(roc_auc_score(y, x.squeeze(1)), abs=1e-6)


class Failing(Scored):
    def metrics(self, model: nn.Module, grain: paceline.Grain) -> Mapping[str, Any]:
        return {"bleu": paceline.Gathered(fails, grain.y)}


def fails(y: torch.Tensor) -> float:
    raise ValueError("no such thing")


@ranks(2)
def test_a_function_that_fails_ends_all_ranks(link: Link) -> None:
    with pytest.raises(ValueError if link.is_first else paceline.PacelineError, match="no such thing"):
        train(open_run(Failing(), paceline.TrainConfig(**PLAIN), link))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "metric 'bad' is float, not a pair"),
        (paceline.Gathered(str, [1]), "the function of metric 'bad' returned str, not a number"),
        (paceline.Gathered(len, torch.tensor(1.0)), r"values of metric 'bad' cannot be joined .* shapes are \(\)"),
    ],
    ids=["number", "text", "no sample"],
)
def test_what_is_no_metric_is_refused(value: Any, message: str) -> None:
    class Bad(Scored):
        def metrics(self, model: nn.Module, grain: paceline.Grain) -> Mapping[str, Any]:
            return {"bad": value}

    with pytest.raises(paceline.PacelineError, match=message):
        paceline.fit(Bad(), **PLAIN)
