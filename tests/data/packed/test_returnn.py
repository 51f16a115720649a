"""The exchange with RETURNN: its package reads what we write, and we read what it writes, value for value."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from paceline.cli.main import main
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.reader import open_packed
from tests.data.packing import Sentences, needs_returnn, packed
from tests.recipes.speech import tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # RETURNN's own are not ours to mend


@pytest.fixture(autouse=True, scope="module")
def _returnn_leaves() -> Iterator[None]:
    """Its modules, also under their old names such as `TFUtil`, are loaded when somebody looks at them.

    One who goes through `sys.modules` in a later test would.
    """
    yield
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] == "returnn":
            del sys.modules[name]


def rows_of(files: list[Path]) -> list[dict[str, Any]]:
    """All that RETURNN finds in files, its tags included."""
    hdf = needs_returnn()
    dataset = hdf.HDFDataset(files=[str(file) for file in files], cache_byte_size=0)
    dataset.init_seq_order(epoch=1)
    found = []
    for number in range(dataset.num_seqs):
        dataset.load_seqs(number, number + 1)
        row = {key: dataset.get_data(number, key) for key in dataset.get_data_keys()}
        found.append({**row, "tag": dataset.get_tag(number)})
    return found


@pytest.mark.parametrize("shard_bytes", [None, 2000])
def test_returnn_reads_samples_of_a_task(tmp_path: Path, shard_bytes: int | None) -> None:
    data = Sentences()
    done = packed(tmp_path / "a.hdf", data, layout="returnn", shard_bytes=shard_bytes, processes=2)
    assert (len(done.files) > 2) == (shard_bytes is not None)
    found = rows_of(done.files)
    assert len(found) == len(data)
    for row, got in enumerate(found):
        sample = data[row]
        assert got["tag"] == data.tags[row]
        for key, name in {"data": "features", "classes": "classes", "half": "half"}.items():
            np.testing.assert_array_equal(got[key], np.asarray(sample[name]))
            assert got[key].dtype == np.asarray(sample[name]).dtype
        assert got["mean"].tolist() == [sample["mean"].item()]
        assert got["speaker"].tolist() == [sample["speaker"]]
        assert got["text"].tobytes().decode() == sample["text"]


def test_returnn_sees_audio_as_dense_and_classes_as_sparse(tmp_path: Path) -> None:
    hdf = needs_returnn()
    tiny.speech(tmp_path, "train", 5, seed=1)
    out = tmp_path / "train.h5"
    assert main(["pack", str(tmp_path / "train.json"), str(out), "--layout", "returnn"]) == 0
    for row, got in enumerate(rows_of([out])):
        samples, _ = soundfile.read(tmp_path / "train" / f"{row}.flac", dtype="int16")
        np.testing.assert_array_equal(got["data"], samples[:, None])
        assert got["text"].tobytes().decode() == tiny.lines_of(tmp_path / "train.json")[row]["text"]
    dataset = hdf.HDFDataset(files=[str(out)])
    assert (dataset.is_data_sparse("data"), dataset.is_data_sparse("text")) == (False, True)
    assert (dataset.get_data_dim("data"), dataset.get_data_dim("text")) == (1, 256)
    packed(tmp_path / "b.h5", layout="returnn")
    classes = hdf.HDFDataset(files=[str(tmp_path / "b.h5")])
    assert (classes.is_data_sparse("classes"), classes.get_data_dim("classes")) == (True, 17)


def test_we_read_what_hdf_dump_writes(tmp_path: Path) -> None:
    """`hdf_dump.py` is this call with a data set from a config."""
    hdf = needs_returnn()
    from returnn.datasets.generating import DummyDataset

    dataset = DummyDataset(input_dim=3, output_dim=7, num_seqs=12, seq_len=9)
    writer = hdf.HDFDatasetWriter(str(tmp_path / "dump.hdf"))
    writer.dump_from_dataset(dataset, start_seq=2, end_seq=8, use_progress_bar=False)
    writer.close()
    found = open_packed(tmp_path / "dump.hdf")
    assert found.stream("data").is_mapped
    compare(PackedDataset(tmp_path / "dump.hdf"), rows_of([tmp_path / "dump.hdf"]))
    assert len(found) == 7, "its last sequence is the one that `end_seq` names, as is ours"


def test_we_read_what_simple_hdf_writer_writes(tmp_path: Path) -> None:
    """In chunks, with tags of variable length; also from other processes, and packed again as a map."""
    hdf = needs_returnn()
    draw = np.random.default_rng(0)
    path = tmp_path / "simple.hdf"
    with hdf.SimpleHDFWriter(str(path), dim=5, extra_type={"align": (11, 1, "int32")}) as writer:
        for batch in range(3):
            lengths = draw.integers(1, 40, 4).tolist()
            inputs = draw.normal(size=(4, max(lengths), 5)).astype(np.float32)
            align = draw.integers(0, 11, (4, 6)).astype(np.int32)
            tags = [f"segment-{batch}-{row}" for row in range(4)]
            writer.insert_batch(inputs, lengths, tags, extra={"align": align})
    theirs = rows_of([path])
    data = PackedDataset(path)
    assert not open_packed(path).stream("data").is_mapped
    compare(data, theirs)
    compare(pickle.loads(pickle.dumps(data)), theirs)
    assert main(["pack", str(path), str(tmp_path / "ours.h5")]) == 0
    assert open_packed(tmp_path / "ours.h5").stream("data").is_mapped
    compare(PackedDataset(tmp_path / "ours.h5"), theirs)


def test_lengths_that_promise_more_than_there_is(tmp_path: Path) -> None:
    import h5py

    packed(tmp_path / "a.h5", layout="returnn")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file["paceline"]  # it is as if RETURNN had written it
        file["seqLengths"][3, 0] += 1
    with pytest.raises(PackedUnreadable, match="incomplete: it holds .* steps of stream 'data'"):
        open_packed(tmp_path / "a.h5")


def compare(ours: PackedDataset, theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for row, other in enumerate(theirs):
        mine = ours[row]
        assert {*mine, "tag"} == set(other)
        assert ours.tags[row] == other["tag"]
        for name, values in mine.items():
            assert torch.equal(values, torch.as_tensor(other[name]))
            assert values.dtype == torch.as_tensor(other[name]).dtype
