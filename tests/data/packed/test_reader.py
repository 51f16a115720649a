"""Packed files as they are read: every value is h5py's and that of the data set they were made of."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.data.packed import reader
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.reader import open_packed
from tests.data.packing import Sentences, assert_same, opened, packed

LAYOUTS = ["paceline", "returnn"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_maps_are_the_data_sets_that_h5py_sees(tmp_path: Path, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(tmp_path / "a.h5", layout=layout)
    with h5py.File(tmp_path / "a.h5") as file:
        for name in found.names:
            place = found.files[0].streams[name]
            values = file[place.dataset][...]
            [(_, _, mapped)] = found.stream(name).parts()
            np.testing.assert_array_equal(mapped.reshape(values.shape), values)
            assert place.starts.dtype == np.int64
    monkeypatch.setattr(h5py, "File", None)
    data = PackedDataset(tmp_path / "a.h5")
    assert_same(pickle.loads(pickle.dumps(data))[3], Sentences()[3])
    view = found.stream("features").view(3)
    assert map_of(view) == ("r--s", str(tmp_path / "a.h5")), "shared through the page cache"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def map_of(array: Any) -> tuple[str, str]:
    """(rights, file) of the map in which an array lies, as Linux tells."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in words[0].split("-"))
        if begin <= address < end:
            return words[1], words[5] if len(words) > 5 else ""
    raise AssertionError("mapped nowhere")


@pytest.mark.parametrize("shard_bytes", [None, 2000])
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, 39), max_size=9))
def test_padded_batches(tmp_path: Path, shard_bytes: int | None, rows: list[int]) -> None:
    path = tmp_path / "a.h5"
    if not path.exists():
        packed(path, shard_bytes=shard_bytes)
    data = Sentences()
    for name in ("features", "classes"):
        expected = [np.asarray(data[row][name]) for row in rows]
        longest = max(map(len, expected), default=0)
        stream = open_packed(path).stream(name)
        padded, lengths = stream.pad(np.array(rows, np.int64))
        assert padded.shape == (len(rows), longest, *stream.shape)
        assert lengths.tolist() == [len(row) for row in expected]
        for place, row in enumerate(expected):
            np.testing.assert_array_equal(padded[place, : len(row)], row)
            assert not padded[place, len(row) :].any()
        wide = np.full((len(rows), longest + 3, *stream.shape), 9, stream.dtype)
        stream.pad(np.array(rows, np.int64), out=wide)
        np.testing.assert_array_equal(wide[:, :longest], padded)
        assert not wide[:, longest:].any()


def test_offsets_beyond_what_32_bits_hold(tmp_path: Path) -> None:
    """A sparse file as hdf_dump would write it, with lengths of 32 bits that add up to more."""
    path, lengths = tmp_path / "large.hdf", [2_000_000_000, 2_100_000_000, 1_000_000_000]
    with h5py.File(path, "w") as file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((sum(lengths),))
        offset = h5py.h5d.create(file.id, b"inputs", h5py.h5t.NATIVE_UINT8, space, creation).get_offset()
        file["seqLengths"] = np.array([[length, 0] for length in lengths], np.int32)
        file["seqTags"] = np.array([b"a", b"b", b"c"])
        file.attrs["inputPattSize"] = 256
    with path.open("r+b") as raw:
        raw.seek(offset + lengths[0] + lengths[1] + 7)
        raw.write(b"\x2a")
    view = open_packed(path).stream("data").view(2)
    assert (len(view), view[7], view[8]) == (1_000_000_000, 42, 0)


# -- what is wrong with a file ---------------------------------------------------------------------------------------


def _cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def _other_hdf5(path: Path) -> None:
    path.unlink()
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(3)


def _newer(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        about = file["paceline"].attrs["about"]
        file["paceline"].attrs["about"] = about.replace('"version": 1', '"version": 2')


def _other_index(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["paceline/starts/features"][1] += 1


@pytest.mark.parametrize(
    ("damage", "what", "hint"),
    [
        (_cut(0.0), "is empty", "paceline pack IN"),
        (_cut(0.3), "is truncated", "pack it again"),
        (_cut(0.999), "is truncated", "pack it again"),
        (lambda path: path.write_text('{"audio_filepath": "a"}'), "is not HDF5", "ends in .json"),
        (_other_hdf5, "is HDF5 of another kind: it holds weights", "hdf_dump"),
        (_newer, "is of version 2, and this is 1", "pack it again"),
        (_other_index, "is damaged: its index is not the one that was written", "pack it again"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder", "name a file"),
        (lambda path: path.rename(path.with_name("ab.h5")), "there is no such file", "did you mean"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, damage: Callable[[Path], Any], what: str, hint: str) -> None:
    path = tmp_path / "a.h5"
    packed(path)
    damage(path)
    with pytest.raises(PackedUnreadable, match=what) as caught:
        open_packed(path)
    assert str(path) in str(caught.value)
    assert hint in caught.value.hint


def test_a_file_that_changes_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    packed(path)
    data = PackedDataset(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(PackedUnreadable, match="has been changed since it was opened"):
        data[0]


def test_a_file_that_is_cut_short_while_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next touch of what is gone would end the process by SIGBUS."""
    monkeypatch.setattr(reader, "LOOK_EVERY_S", 0.0)
    path, kept = tmp_path / "a.h5", tmp_path / "kept.h5"
    packed(path)
    stream = open_packed(path).stream("features")
    rows = np.arange(len(stream))
    before = stream.pad(rows)[0]
    path.rename(kept)
    shutil.copy(kept, path)
    os.truncate(path, 2000)  # another file by now: the map has all of the first
    assert np.array_equal(stream.pad(rows)[0], before)
    kept.replace(path)
    os.truncate(path, 2000)
    for read in (lambda: stream.pad(rows), lambda: stream.view(0)):
        with pytest.raises(PackedUnreadable, match=r"a.h5: has been cut short while it was read: 2,000 bytes are left"):
            read()


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    packed(tmp_path / "a.h5", shard_bytes=2000)
    packed(tmp_path / "b.h5", Sentences(39), shard_bytes=2000)
    [shard] = tmp_path.glob("a-*-00001.h5")
    [other] = tmp_path.glob("b-*-00001.h5")
    kept = shard.read_bytes()
    shard.write_bytes(other.read_bytes())
    with pytest.raises(PackedUnreadable, match=r"a-\w+-00001.h5: is not the shard that a.h5 was made with"):
        open_packed(tmp_path / "a.h5")
    shard.unlink()
    with pytest.raises(PackedUnreadable, match=r"a-\w+-00001.h5: there is no such file"):
        open_packed(tmp_path / "a.h5")
    shard.write_bytes(kept)
    assert len(open_packed(shard)) < len(open_packed(tmp_path / "a.h5")) == 40
