"""Validation at any number of ranks against plain sums over the whole set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule
from paceline.train.evaluation import evaluate, evaluation_plan
from paceline.train.metrics import MetricContract
from paceline.world.link import Link
from tests.ranks import run_ranks

SIZES = (1, 2, 3, 5, 17, 64, 101)


def values(num_samples: int) -> torch.Tensor:
    return torch.randn(num_samples, dtype=torch.float64, generator=torch.Generator().manual_seed(num_samples))


def metrics(grain: Grain) -> dict[str, tuple[Any, Any]]:
    (x,) = grain
    return {"mean": (x.sum(), len(x)), "positive": ((x > 0).sum(), len(x)), "batches": (1, 1)}


def run(link: Link, num_samples: int, batch: int) -> dict[str, float]:
    loader = Loader(TensorDataset(values(num_samples)), workers=0)
    return evaluate(metrics, loader, evaluation_plan(num_samples, BatchRule(batch)), link)


@pytest.mark.parametrize("num_samples", SIZES)
def test_the_same_numbers_at_any_world_size(num_samples: int) -> None:
    x = values(num_samples)
    results = [found for size in (1, 2, 3, 4) for found in run_ranks(size, run, num_samples, 4)]
    for found in results:
        assert found == results[0]  # bitwise: batches are summed in a fixed order
        assert found["positive"] == float((x > 0).sum()) / num_samples
        assert found["mean"] == pytest.approx(float(x.mean()), rel=1e-12)
        assert found["batches"] == 1.0


def run_sorted(link: Link) -> list[int]:
    lengths = np.array([5, 1, 4, 2, 9, 3])
    seen: list[int] = []

    def note(grain: Grain) -> dict[str, tuple[Any, Any]]:
        seen.extend(grain.samples.tolist())
        return {"count": (len(grain), 1)}

    loader = Loader(TensorDataset(torch.arange(6)), workers=0)
    evaluate(note, loader, evaluation_plan(6, BatchRule(2), lengths), link)
    return seen


def test_every_sample_once_by_length() -> None:
    assert run_ranks(1, run_sorted)[0] == [3, 1, 2, 5, 4, 0]  # batches by length, the longest sample of each first
    assert sorted(sum(run_ranks(4, run_sorted), [])) == list(range(6))


def run_limited(link: Link) -> dict[str, float]:
    loader = Loader(TensorDataset(values(64)), workers=0)
    return evaluate(metrics, loader, evaluation_plan(64, BatchRule(4)), link, limit_batches=3)


def test_limit_batches_takes_the_same_ones_on_all_ranks() -> None:
    expected = float(values(64)[:12].mean())
    for size in (1, 2):
        assert run_ranks(size, run_limited)[0]["mean"] == pytest.approx(expected, rel=1e-12)


def run_wrong(link: Link) -> None:
    loader = Loader(TensorDataset(values(4)), workers=0)
    evaluate(lambda grain: {"loss": grain[0].mean()}, loader, evaluation_plan(4, BatchRule(4)), link)  # type: ignore[dict-item]


def test_a_mean_is_no_metric() -> None:
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    with pytest.raises(MetricContract, match="'loss' is Tensor"):
        run_wrong(start(discover({}), device="cpu", threads=1))
