"""Samples as they are packed: those of the epoch, of the wanted rows and streams; other data is not mixed in."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.disk import CannotWrite
from paceline.core.errors import AlreadyExists
from paceline.data.collate import stack_collate
from paceline.data.fetch import Fetch, Request, seed_everything
from paceline.data.packed import from_samples
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import NoSuchStream
from paceline.data.packed.from_samples import NotPackable
from paceline.data.packed.piece import StreamsDiffer
from tests.data.packing import Sentences, assert_whole, packed


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_samples, "ROWS_AT_ONCE", 4)


class Random:
    """Samples that are drawn anew in every epoch."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.rand(3)


class Changed(Sentences):
    """The same, but for one stream, after somebody has mended something."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**super().__getitem__(row), "speaker": row % 3 + 1}


class Unseeded(Random):
    """Samples that no seed gives again."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self._draw.normal(size=3))


def _stopped(out: Path, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are there, and the file is not."""

    def full(*words: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CannotWrite):
            packed(out, data)


def test_other_samples_are_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.h5"
    _stopped(out, Sentences(), monkeypatch)
    with pytest.raises(AlreadyExists, match="of different data, code or options"):
        packed(out, Changed())
    packed(out, Changed(), force=True)
    assert_whole(out, Changed())


def test_samples_that_no_seed_gives_again_can_be_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.h5"
    _stopped(out, Unseeded(), monkeypatch)
    assert packed(out, Unseeded()).num_resumed == 20


def test_who_packs_draws_the_same_numbers_after_it(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    expected = []
    for has_packed in (False, True):
        seed_everything(3)
        if has_packed:
            packed(tmp_path / "a.h5", Random())
        expected.append(draw())
    assert expected[0] == expected[1]


@pytest.mark.parametrize("epoch", [0, 4])
def test_random_samples_are_those_of_the_epoch(tmp_path: Path, epoch: int) -> None:
    packed(tmp_path / "a.h5", Random(), seed=7, epoch=epoch, processes=2)
    fetch = Fetch(Random(), stack_collate, seed=7)
    expected = fetch(Request(epoch, 0, np.arange(10))).data
    found = PackedDataset(tmp_path / "a.h5")
    assert torch.equal(torch.stack([found[row] for row in range(10)]), expected)


def test_some_rows_and_some_streams(tmp_path: Path) -> None:
    packed(tmp_path / "a.h5", rows=range(5, 12), streams=("text", "mean"))
    found, data = PackedDataset(tmp_path / "a.h5"), Sentences()
    assert [list(found[row]) for row in range(7)] == [["text", "mean"]] * 7
    assert [found[row]["text"] for row in range(7)] == [data[row]["text"] for row in range(5, 12)]
    assert found.tags == data.tags[5:12]
    assert found.lengths.tolist() == data.lengths[5:12].tolist()


@pytest.mark.parametrize(
    ("data", "error", "what"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], StreamsDiffer, r"seq-1: stream 'data' is float32 \(any, 4\), and"),
        ([torch.zeros(2)] * 4 + [torch.zeros(2).double()], StreamsDiffer, "seq-4: stream 'data' is float64"),
        ([{"a": 1}, {"b": 1}], NotPackable, "sample 1: it has no 'a'"),
        ([{"a": object()}], NotPackable, "sample 0: 'a' is object"),
        ([{"a/b": 1}], NotPackable, "'a/b' is no name for a stream"),
        ([np.array(["a"])], NotPackable, "'data' is of type <U1"),
        ([torch.zeros(2, dtype=torch.bfloat16)], NotPackable, "'data' is bfloat16"),
    ],
)
def test_samples_that_cannot_be_packed(tmp_path: Path, data: Any, error: Any, what: str) -> None:
    with pytest.raises(error, match=what) as caught:
        packed(tmp_path / "a.h5", data)
    assert caught.value.hint
    assert not (tmp_path / "a.h5").exists()


def test_no_such_stream(tmp_path: Path) -> None:
    with pytest.raises(NoSuchStream, match="'txt'"):
        packed(tmp_path / "a.h5", streams=("txt",))
