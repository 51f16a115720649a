"""Samples of a packed data set: they come back as they were packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.collate import pad_collate
from paceline.data.fetch import Fetch, Request
from paceline.data.loader import Loader
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import NoSuchStream, PackedUnreadable
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


def _returnn(path: Path, *, chunks: bool = False) -> Path:
    """A file as RETURNN's SimpleHDFWriter makes it, with text that another program wrote in a stream."""
    lengths = np.array([3, 4, 5])
    with h5py.File(path, "w") as file:
        file["seqLengths"] = np.stack([lengths, lengths], axis=1).astype(np.int32)
        file["seqTags"] = np.array([b"a", b"b", b"c"])
        more = {"chunks": (4,), "compression": "gzip"} if chunks else {}
        file.create_dataset("inputs", data=np.arange(12, dtype=np.float32), **more)
        file.create_dataset("targets/data/classes", data=np.arange(12, dtype=np.int32))
        file.create_group("targets/size").attrs["classes"] = [12, 1]
    return path


def test_more_rows_than_the_file_can_hold(tmp_path: Path) -> None:
    """On ce01e4b a MemoryError: HDF5 makes up what was never written."""
    path = _returnn(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["seqLengths"]
        file.create_dataset("seqLengths", shape=(2**40, 2), dtype="i4", chunks=(1024, 2))
    with pytest.raises(PackedUnreadable, match=r"/seqLengths claims 8\.8 TB, and 0 B are in the file"):
        PackedDataset(path)
    packed(tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        del file["paceline/tags/values"]
        file.create_dataset("paceline/tags/values", shape=(2**45,), dtype="u1", chunks=(1024,))
    with pytest.raises(PackedUnreadable, match="claims 35.2 TB"):
        PackedDataset(tmp_path / "b.h5")


def test_text_that_is_none(tmp_path: Path) -> None:
    """On ce01e4b a UnicodeDecodeError of the sample."""
    path = tmp_path / "a.h5"
    packed(path, ["häuser", "wege"])
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xff\xff"))
    data = PackedDataset(path)
    assert data[1] == "wege"
    with pytest.raises(PackedUnreadable, match=r"row 1 of stream '.*' is not text \(UTF-8\): .* at byte 2"):
        data[0]


def test_a_chunk_that_cannot_be_decoded(tmp_path: Path) -> None:
    """On ce01e4b an OSError of h5py's, without the name of the file."""
    path = _returnn(tmp_path / "a.h5", chunks=True)
    with h5py.File(path, "r") as file:
        chunk = file["inputs"].id.get_chunk_info(1)
    raw = bytearray(path.read_bytes())
    raw[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    path.write_bytes(raw)
    data = PackedDataset(path)
    assert data[0]["data"].tolist() == [0, 1, 2]
    with pytest.raises(PackedUnreadable, match="a.h5: steps 4 to 7 of /inputs cannot be read: OSError: "):
        data[1]


@pytest.mark.parametrize(
    ("dataset", "values", "what"),
    [
        ("seqLengths", [[3, 3], [-4, -4], [5, 5]], "does not have 3 rows"),
        ("seqLengths", [[3, 3], [4, 4]], "does not have 3 rows"),
        ("seqLengths", [[3, 3], [2**31 - 1, 3], [5, 5]], "is incomplete"),
        ("seqLengths", 3, "is damaged"),
        ("seqTags", np.zeros((0,), "S1"), "does not have 0 rows"),
    ],
)
def test_an_index_of_nonsense(dataset: str, values: Any, what: str, tmp_path: Path) -> None:
    path = _returnn(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file[dataset]
        file[dataset] = values
    with pytest.raises(PackedUnreadable, match=what):
        PackedDataset(path)
