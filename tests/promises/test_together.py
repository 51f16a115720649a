"""Everything goes together: features two at a time, on 1 and 2 ranks, train with the losses that they must have, or are
refused by an entry of docs/together.md and by nothing else.

A pair in which every feature occurs is run in CI; `--long` (`make full`) runs all of them.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.data.packing import packed
from tests.promises.together import FEATURES, SLOW, Outcome, digits_of, pairs, reference_of, refusals, sample, train
from tests.train.sharded import NUM_SAMPLES, points

SEED = 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        chosen = pairs() if metafunc.config.getoption("--long") else sample(SEED)
        metafunc.parametrize("pair", chosen, ids=" and ".join)
    if "feature" in metafunc.fixturenames:
        metafunc.parametrize("feature", FEATURES if metafunc.config.getoption("--long") else [])


class Runs:
    """Runs that were made, each once."""

    def __init__(self, folder: Path) -> None:
        self.packed = folder / "points.h5"
        packed(self.packed, points(NUM_SAMPLES, seed=1))
        self.run = cache(lambda names, size: train(names, size, self.packed, folder / f"{'+'.join(names)} on {size}"))

    def check(self, names: tuple[str, ...], size: int) -> None:
        outcome: Outcome = self.run(names, size)
        expected = refusals(names, self.packed)
        if expected:
            assert (outcome.error, outcome.message.splitlines()) == ("settings", expected)
            return
        if outcome.error:
            assert outcome.is_declared, f"refused by {outcome.error}, which docs/together.md has not: {outcome.message}"
            return
        assert outcome.losses
        assert all(map(math.isfinite, outcome.losses))
        reference = reference_of(names, size)
        if reference is not None:
            other: Any = self.run(*reference)
            assert not other.error, f"{reference} was refused, but not with more features: {other.message}"
            same = pytest.approx(other.losses, rel=digits_of(names))
            assert outcome.losses == same, f"losses are not those of {reference}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("size", [1, 2])
def test_a_pair_of_features(pair: tuple[str, str], size: int, runs: Runs) -> None:
    runs.check(pair, size)


@pytest.mark.parametrize("size", [1, 2])
def test_a_feature_alone(feature: str, size: int, runs: Runs) -> None:
    runs.check((feature,), size)


def test_every_feature_is_in_the_sample() -> None:
    assert {name for pair in sample(SEED) for name in pair} == set(FEATURES) - SLOW
    assert set(sample(SEED)) <= set(pairs())
    assert len(pairs()) > 900
