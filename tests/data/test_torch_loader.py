"""Data from elsewhere: torch's DataLoader, Hugging Face's shards, streams that know where they are.

On ce01e4b a DataLoader of 8 batches of 2 was trained on in 4 steps (two batches were the two samples of a step), and
an `IterableDataset` of Hugging Face raised ZeroDivisionError and IndexError on two ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.ranks import ranks

PLAIN: dict[str, Any] = {"level": 0, "workers": 0, "progress": "none", "order": "none"}


class Sums(paceline.Task):
    """Remembers what it was trained on."""

    def __init__(self, data: Any, stop_after: int | None = None) -> None:
        self._data, self._stop_after = data, stop_after
        self.seen: list[list[float]] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return self._data

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        x = grain.x if isinstance(grain.data, dict) else grain[0]
        if model.training:
            self.seen.append(x.flatten().tolist())
        return model(x.reshape(-1, 1)).square().sum(), len(grain)

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        if self._stop_after is not None and len(self.seen) == self._stop_after:
            os.kill(os.getpid(), signal.SIGTERM)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def doubled(samples: list[Any]) -> Any:
    return (2 * torch.stack([sample[0] for sample in samples]),)


def test_a_loader_is_its_data_set_and_its_collate() -> None:
    task = Sums(DataLoader(numbers(16), batch_size=4, shuffle=True, collate_fn=doubled))
    assert paceline.fit(task, epochs=1, global_batch=4, **PLAIN).num_steps == 4
    assert task.seen[1] == [8.0, 10.0, 12.0, 14.0]


def test_an_engine_says_once_what_it_leaves_of_a_loader(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was said: 10 samples in batches of 4 were 3 steps, although the loader drops the last."""
    engine = paceline.Engine(level=0)
    loader = DataLoader(numbers(10), batch_size=4, drop_last=True)
    assert [len(list(engine.batches(loader, global_batch=4))) for _ in range(2)] == [3, 3]
    engine.close()
    said = capsys.readouterr().err
    assert said.count("batches, order and workers are those of the settings") == 1
    assert said.count("its `drop_last` is not: set `drop_last`") == 1


def test_a_loader_without_a_batch_in_the_settings_is_asked_about() -> None:
    with pytest.raises(paceline.PacelineError, match="batches of 4, but a step of this run has 32") as error:
        paceline.fit(Sums(DataLoader(numbers(16), batch_size=4)), epochs=1, **PLAIN)
    assert "`--global-batch 4`" in error.value.hint
    assert paceline.fit(Sums(DataLoader(numbers(64), batch_size=32)), epochs=1, **PLAIN).num_steps == 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(numbers(4), sampler=WeightedRandomSampler([1.0] * 4, 4)), "WeightedRandomSampler chooses"),
        (
            DataLoader(
                numbers(4), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(range(4)), 2, False)
            ),
            "Own chooses",
        ),
        (DataLoader(numbers(4), batch_size=None), "batch_size=None"),
        (DataLoader(numbers(4), sampler=SequentialSampler(range(2))), "SequentialSampler chooses"),
        (DataLoader(numbers(4), sampler=RandomSampler(range(2))), "RandomSampler chooses"),
        (
            DataLoader(numbers(4), batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 4, 4), 2, False)),
            "WeightedRandomSampler chooses",
        ),
    ],
    ids=["sampler", "batch-sampler", "no-batches", "part", "random part", "sampler of batches"],
)
def test_loaders_that_decide_more_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(paceline.PacelineError, match=message) as error:
        paceline.fit(Sums(loader), epochs=1, global_batch=4, **PLAIN)
    assert "loader.dataset" in error.value.hint


def test_a_loader_that_drops_its_last_batch_is_told_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    task = Sums(DataLoader(numbers(10), batch_size=4, drop_last=True))
    told = {**PLAIN, "progress": "lines", "global_batch": 4, "epochs": 1}
    assert paceline.fit(task, **told).num_steps == 3
    assert "set `drop_last` (`--drop-last`)" in capsys.readouterr().out
    assert paceline.fit(task, drop_last=True, **told).num_steps == 2
    assert "set `drop_last`" not in capsys.readouterr().out


def test_loaders_validate_and_feed_an_engine() -> None:
    class Validated(Sums):
        def val_data(self) -> Any:
            return {"dev": DataLoader(numbers(6), batch_size=2, collate_fn=doubled)}

        def metrics(self, model: nn.Module, grain: paceline.Grain) -> Any:
            return {"mean": (grain[0].sum(), len(grain))}

    result = paceline.fit(Validated(numbers(4)), epochs=1, global_batch=4, **PLAIN)
    assert result.metrics == {"dev/mean": 5.0}
    engine = paceline.Engine(level=0)
    batches = engine.batches(DataLoader(numbers(6), batch_size=3, collate_fn=doubled), global_batch=3, order="none")
    assert [batch.grains[0][0].tolist() for batch in batches] == [[0, 2, 4], [6, 8, 10]]
    engine.close()


class Numbers(IterableDataset[Any]):
    """A stream as Hugging Face's: `shard(num_shards, index)`, epochs, and a state of its own."""

    def __init__(self, shards: list[range]) -> None:
        self.shards, self.epoch, self.num_read = shards, 0, 0
        self._where: dict[str, int] = {"number": 0}
        self._start = 0

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Numbers:
        return Numbers(self.shards[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return dict(self._where)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["number"]

    def __iter__(self) -> Iterator[Any]:
        row = [number for shard in self.shards for number in shard]
        start, self._start = self._start, 0
        for number in range(start, len(row)):
            self.num_read += 1
            self._where = {"number": number + 1}
            yield {"x": torch.tensor(float(row[number] + 100 * self.epoch))}


class LiveNumbers(Numbers):
    """A stream that returns the state which it goes on writing to."""

    def state_dict(self) -> dict[str, int]:
        return self._where

    def __iter__(self) -> Iterator[Any]:
        where = self._where
        for sample in super().__iter__():
            where.update(self._where)
            self._where = where
            yield sample


@pytest.mark.parametrize("kind", [Numbers, LiveNumbers])
def test_a_stream_goes_on_where_it_was(kind: type[Numbers], tmp_path: Path) -> None:
    settings = {"epochs": 2, "global_batch": 4, "out": tmp_path / "run", **PLAIN}
    undisturbed = Sums(kind([range(20)]))
    paceline.fit(undisturbed, epochs=2, global_batch=4, **PLAIN)
    assert undisturbed.seen[5][0] == 100.0  # the second epoch is told of
    paceline.fit(Sums(kind([range(20)]), stop_after=3), **settings)
    stream = kind([range(20)])
    resumed = Sums(stream)
    paceline.fit(resumed, resume="auto", **settings)
    assert resumed.seen == undisturbed.seen[3:]
    assert stream.num_read == 20 + 8  # not the 12 before


@ranks(1, 2)
def test_shards_of_ranks_go_on_where_they_were(link: Link, tmp_path: Path) -> None:
    def run(task: Sums, **more: Any) -> Any:
        out = tmp_path / "run"
        config = paceline.TrainConfig(epochs=1, global_batch=4, grains=2, out=out, save_every_steps=1, **PLAIN, **more)
        return train(open_run(task, config, link))

    rank, size = link.world.rank, link.world.size
    whole = Numbers([range(10), range(10, 20)])
    run(Sums(whole), steps=2)
    stream = Numbers([range(10), range(10, 20)])
    task = Sums(stream)
    run(task, resume="auto", allow_change=True)
    seen = [number for grain in task.seen for number in grain]
    if size == 1:
        assert seen == [float(number) for number in range(8, 20)]
        assert stream.num_read == 12
    else:  # two of its own in every step
        assert seen == [float(number) for number in range(10 * rank + 4, 10 * rank + 10)]
        assert stream.num_read == 0  # its shards were read, not the whole


def test_a_state_that_forgets_samples_is_not_used(tmp_path: Path) -> None:
    class BufferShuffledExamplesIterable:  # as Hugging Face calls it
        ex_iterable = None

    class Shuffled(Numbers):
        def __init__(self, shards: list[range]) -> None:
            super().__init__(shards)
            self._ex_iterable = BufferShuffledExamplesIterable()

    settings = {"epochs": 1, "global_batch": 4, "out": tmp_path / "run", **PLAIN}
    paceline.fit(Sums(Shuffled([range(20)]), stop_after=3), **settings)
    stream = Shuffled([range(20)])
    resumed = Sums(stream)
    paceline.fit(resumed, resume="auto", **settings)
    assert (resumed.seen[0], stream.num_read) == ([12.0, 13.0, 14.0, 15.0], 20)
