"""What a data set offers is found in one place, whatever kind of attribute it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from paceline.data.dataset import DatasetTraits, fingerprint
from paceline.data.packed.dataset import PackedDataset


def test_size_lengths_counts_and_content_count() -> None:
    class Named(list[int]):
        fingerprint = "a"

    three, lengths = [1, 2, 3], np.array([1.0, 2.0, 3.0])
    prints = [
        fingerprint(three, None, None),
        fingerprint([1, 2], None, None),
        fingerprint(three, lengths, None),
        fingerprint(three, lengths[::-1], None),
        fingerprint(three, lengths, lengths),
        fingerprint(Named(three), None, None),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint([4, 5, 6], lengths.copy(), None) == prints[2]  # what a list holds is not looked at


class Walk(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def shard(self, rank: int, size: int) -> list[int]:
        return list(range(rank, 3, size))


class Everything:
    """Offers all that is optional; `tags` may be costly, so nobody may ask for them in passing."""

    is_packed = True
    reads_leave_nothing_open = True
    total_length = 2
    fingerprint = "abc"
    names = ("a", "b")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, samples: list[int]) -> list[int]:
        return samples

    def read_grain(self, samples: Any, seeds: Any, collate: Any) -> None:
        return None

    @property
    def lengths(self) -> list[int]:
        return [3, 4]

    @property
    def counts(self) -> tuple[float, ...]:
        return (1.0, 2.0)

    @property
    def tags(self) -> list[str]:
        raise ArithmeticError("asked for")


@pytest.mark.parametrize(
    ("data", "is_map_style", "is_stream"),
    [
        ([1, 2], True, False),
        (TensorDataset(torch.zeros(2)), True, False),
        (Subset([1, 2, 3], [0]), True, False),  # type: ignore[arg-type]
        (np.zeros(3), True, False),
        (Walk(), False, True),
        ((number for number in range(3)), False, True),
        ({1, 2}, False, True),
        (3, False, False),
    ],
)
def test_kinds_of_data(data: Any, is_map_style: bool, is_stream: bool) -> None:
    traits = DatasetTraits(data)
    assert (traits.is_map_style, traits.is_stream) == (is_map_style, is_stream)


def test_a_plain_data_set_offers_nothing() -> None:
    traits = DatasetTraits([1, 2])
    nothing = ("lengths", "counts", "total_length", "fingerprint", "names", "tags")
    assert [getattr(traits, name) for name in nothing] == [None] * 6
    assert (traits.sample_reader, traits.grain_reader, traits.is_cut_for(2)) == (None, None, False)
    assert not traits.is_packed
    assert not traits.reads_leave_nothing_open


def test_a_data_set_that_offers_everything() -> None:
    data = Everything()
    traits = DatasetTraits(data)
    assert traits.lengths is not None
    assert traits.lengths.tolist() == [3, 4]
    assert traits.counts is not None
    assert traits.counts.tolist() == [1.0, 2.0]
    assert (traits.total_length, traits.fingerprint, traits.names) == (2.0, "abc", ("a", "b"))
    assert traits.sample_reader is data
    assert traits.grain_reader is data
    assert traits.is_packed
    assert traits.reads_leave_nothing_open
    with pytest.raises(ArithmeticError, match="asked for"):
        _ = traits.tags
    walk = Walk()
    assert DatasetTraits(walk).is_cut_for(2)


def test_packed_data_offers_what_the_protocol_names(tmp_path: Any) -> None:
    data = PackedDataset.write(tmp_path / "a.h5", Ragged())
    traits = DatasetTraits(data)
    assert traits.is_packed
    assert traits.reads_leave_nothing_open
    assert traits.tags == traits.names == ["seq-0", "seq-1"]
    assert traits.fingerprint == data.fingerprint
    assert traits.lengths is not None
    assert traits.lengths.tolist() == [1, 2]
    assert traits.counts is None


class Ragged:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(index + 1)
