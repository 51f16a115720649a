"""Samples of a packed data set: they come back as they were packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.collate import pad_collate
from paceline.data.fetch import Fetch, Request
from paceline.data.loader import Loader
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import NoSuchStream
from paceline.data.plan import BatchRule, Plan
from tests.data.packing import Sentences, assert_same, opened, packed

LAYOUTS = ["paceline", "returnn"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shard_bytes", [None, 2000])
def test_samples_come_back_as_they_were(tmp_path: Path, layout: Any, shard_bytes: int | None) -> None:
    data = Sentences()
    packed(tmp_path / "a.h5", data, layout=layout, shard_bytes=shard_bytes, processes=2)
    found = PackedDataset(tmp_path / "a.h5")
    assert len(found) == len(data)
    for row in range(-len(data), len(data)):
        assert_same(found[row], data[row % len(data)])
    assert list(found.tags) == data.tags
    assert found.lengths.tolist() == data.lengths.tolist()
    for row in (len(data), -len(data) - 1):
        with pytest.raises(IndexError):
            found[row]


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(6).view(2, 3),
        (torch.tensor([True, False]), 3.5, "text", False),
        [np.int16(7), torch.zeros(0, 4)],
        {"a": torch.tensor(1.5), "b": np.arange(3, dtype=">i4")},
    ],
    ids=["tensor", "tuple", "list", "dictionary"],
)
def test_shapes_of_samples(tmp_path: Path, sample: Any) -> None:
    found = opened(tmp_path / "a.h5", [sample, sample])
    again = PackedDataset(tmp_path / "a.h5")[1]
    assert len(found) == 2
    if isinstance(sample, dict):
        assert again["a"].shape == ()
        assert_same(again["b"], torch.arange(3, dtype=torch.int32))
    elif isinstance(sample, tuple):
        assert [type(value) for value in again] == [torch.Tensor, float, str, bool]
        assert again[1:] == sample[1:]
        assert_same(again[0], sample[0])
    elif isinstance(sample, list):
        assert (again[0].item(), again[0].dtype, again[1].shape) == (7, torch.int16, (0, 4))
    else:
        assert_same(again, sample)


def test_what_a_user_does_to_a_sample_stays_with_it(tmp_path: Path) -> None:
    packed(tmp_path / "a.h5")
    data = PackedDataset(tmp_path / "a.h5")
    data[4]["features"].zero_()
    assert_same(data[4], Sentences()[4])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_the_same(tmp_path: Path, context: str) -> None:
    packed(tmp_path / "a.h5", shard_bytes=2000)
    data = PackedDataset(tmp_path / "a.h5", streams=["features", "classes"])
    data[0]  # mapped before the fork
    options: Any = {"num_workers": 2 if context == "fork" else 1, "multiprocessing_context": context}
    read = list(DataLoader(data, batch_size=8, collate_fn=pad_collate, **options))  # type: ignore[arg-type]
    here = list(DataLoader(data, batch_size=8, collate_fn=pad_collate))  # type: ignore[arg-type]
    assert len(read) == 5
    for mine, other in zip(here, read, strict=True):
        assert_same(dict(mine), dict(other))


def test_the_loader_takes_packed_data_of_a_task(tmp_path: Path) -> None:
    """As training reads it: planned by its lengths, with as many workers as it likes."""
    packed(tmp_path / "a.h5", streams=("features", "speaker"))
    data = PackedDataset(tmp_path / "a.h5")
    plan = Plan(len(data), rule=BatchRule(8), grains=2, seed=3, lengths=data.lengths, order="sorted")
    loader = Loader(data, collate=pad_collate, workers="auto")
    seen = [grain["features_lengths"] for batch in loader.run(plan) for grain in batch.grains]
    assert sorted(torch.cat(seen).tolist()) == sorted(data.lengths.tolist())
    loader.close()
    grain = Fetch(data, pad_collate, 0)(Request(0, 0, np.array([5, 2])))
    assert grain["speaker"].tolist() == [2, 2]


def test_streams_are_named(tmp_path: Path) -> None:
    packed(tmp_path / "a.h5", streams=("features",))
    with pytest.raises(NoSuchStream, match="no stream 'text'") as caught:
        PackedDataset(tmp_path / "a.h5", streams=["text"])
    assert "there are: features" in caught.value.hint
