"""Training data: the same on all ranks and after a resume, and batches of any epoch from any step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from paceline.config.settings import TrainConfig
from paceline.core.errors import RanksDiffer
from paceline.data.grain import Batch
from paceline.train.autotune import shapes
from paceline.train.feed import DataChanged, Feed, TrainingData, check_ranks
from paceline.train.loop import train
from paceline.world.link import Link
from tests.ranks import ranks
from tests.train.small import SmallTask, alone, opened, points


def test_the_message_names_the_rank() -> None:
    check_ranks([(5, "a"), (5, "a")])
    with pytest.raises(RanksDiffer, match="5 samples on rank 0, 4 samples on rank 2"):
        check_ranks([(5, "a"), (5, "a"), (4, "b")])
    with pytest.raises(RanksDiffer, match="of the same size, but not the same"):
        check_ranks([(5, "a"), (5, "b")])


class Uneven(SmallTask):
    def train_data(self) -> Any:
        return points(20 - self.world.rank, seed=1)


@ranks(2)
def test_ranks_with_other_data_are_refused(link: Link) -> None:
    with pytest.raises(RanksDiffer, match="20 samples on rank 0, 19 samples on rank 1"):
        train(opened(Uneven(), None, link=link, epochs=1))


class Shorter(SmallTask):
    def train_data(self) -> TensorDataset:
        return points(16, seed=1)


def test_a_run_is_not_resumed_on_other_data_unless_allowed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(opened(SmallTask(), out, steps=2, epochs=2))
    with pytest.raises(DataChanged, match="not what it was"):
        train(opened(Shorter(), out, resume="auto", epochs=2, steps=4))
    assert train(opened(Shorter(), out, resume="auto", epochs=2, steps=4, allow_change=True)).num_steps == 4


def feed(**settings: Any) -> Feed:
    config = TrainConfig(epochs=1, **{"global_batch": 4, **settings})
    return Feed(TrainingData.of(points(14, seed=1)), config, alone(), grains=2, seed=3)


@dataclass(frozen=True)
class Fits:
    """Notes the grains that it is fitted to."""

    grains: tuple[tuple[int, ...], ...] = ()

    def __call__(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def fitted(self, grains: Iterable[Any]) -> Fits:
        return Fits(tuple(tuple(grain.tolist()) for grain in grains))


def test_shapes_are_chosen_for_the_first_epochs_and_each_size_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "LOOKED_AT", 8)
    data, config = points(14, seed=1), TrainConfig(epochs=9, global_batch=4, batch_schedule=("7@e6",))
    made = Feed(TrainingData.of(data, Fits()), config, alone(), grains=1, seed=3)
    looked_at = [made.plan(epoch).batch(step) for epoch in (5, 0, 1) for step in range(made.plan(epoch).num_steps)]
    assert isinstance(made.collate, Fits)
    assert list(made.collate.grains) == [tuple(batch.tolist()) for batch in looked_at]
    assert {len(grain) for grain in made.collate.grains} == {7, 4, 2}


def ids(batches: Iterable[Batch]) -> list[Any]:
    return [(batch.epoch, batch.step, [grain.samples.tolist() for grain in batch.grains]) for batch in batches]


@pytest.mark.parametrize("distribution", ["shard", "random_seed_offset"])
def test_workers_that_read_on_give_the_epochs_in_any_order(distribution: str) -> None:
    inline = feed(workers=0, dataset_distribution=distribution)
    reading_on = feed(workers=1, dataset_distribution=distribution)
    reading_on.end_epoch = 3
    next(reading_on.batches(0))  # broken off
    for epoch, start in [(0, 0), (1, 0), (2, 0), (3, 0), (1, 2), (2, 0), (0, 3)]:
        assert ids(reading_on.batches(epoch, start)) == ids(inline.batches(epoch, start))
    assert ids(inline.batches(0)) != ids(inline.batches(1))
    reading_on.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_over_has_no_batches(workers: int) -> None:
    done = feed(workers=workers)
    assert done.num_steps(0) == 4
    assert ids(done.batches(0, 4)) == []
    assert [step for _, step, _ in ids(done.batches(0, 3))] == [3]
    done.close()


def test_a_grain_is_read_as_its_epoch_has_it() -> None:
    both = feed(workers=0, order="none")
    [grain] = both.read([(1, 1)])
    assert grain.samples.tolist() == [6, 7]
    assert torch.equal(grain.x, next(itertools.islice(both.batches(0), 1, None)).grains[1].x)


class UnevenShards:
    """A stream of unknown length whose second shard is shorter."""

    def __iter__(self) -> Any:
        raise AssertionError("it is read by shard")

    def shard(self, rank: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.zeros(4), torch.zeros(()))] * (20 if rank == 0 else 5)


@ranks(2)
def test_a_limit_ends_the_epoch_on_all_ranks_in_the_same_step(link: Link) -> None:
    config = TrainConfig(epochs=1, global_batch=4, limit_batches=4)
    batches = list(Feed(TrainingData.of(UnevenShards()), config, link, grains=2, seed=3).batches(0, 0))
    assert [(batch.step, batch.is_last) for batch in batches] == [(0, False), (1, False), (2, False), (3, True)]
    assert not batches[-1].has_next
