"""Packing: killed at any moment it goes on where it was, and what it writes is whole or not there."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.disk import CannotWrite, DiskFull
from paceline.data.collate import stack_collate
from paceline.data.fetch import Fetch, Request, seed_everything
from paceline.data.packed import from_samples as pack_samples
from paceline.data.packed import writer as hdf_write
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import NoSuchStream, PackedUnreadable
from paceline.data.packed.from_samples import NotPackable
from paceline.data.packed.pack import PackExists, WorkerDied, bytes_left
from paceline.data.packed.parts import OtherParts
from paceline.data.packed.piece import StreamsDiffer, read_piece
from paceline.data.packed.reader import open_packed
from paceline.data.packed.verify import verify
from tests.crash import KILLED
from tests.data.packing import NUMBER, Sentences, assert_same, packed


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_samples, "ROWS_AT_ONCE", 4)


def assert_whole(out: Path, data: Any) -> None:
    found = PackedDataset(out)
    assert len(found) == len(data)
    for row in range(len(data)):
        assert_same(found[row], data[row])
    assert verify(open_packed(out))[0] == []
    assert not out.with_name(f"{out.name}.parts").exists()
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


# -- kills -----------------------------------------------------------------------------------------------------------


def _kill_packer(at: int) -> Callable[[int], None]:
    """Before row `at` is read by whichever process that the one which packs began, that one is gone."""
    not_to_kill = os.getpid()

    def dies(row: int) -> None:
        if row == at and os.getppid() != not_to_kill:
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()  # until this one is, too

    return dies


def _write_down(path: Path) -> Callable[[int], None]:
    """Rows that are read to be packed, which is done in other processes than this one."""
    path.touch()
    not_by = os.getpid()

    def note(row: int) -> None:
        if os.getpid() != not_by:
            with path.open("a") as file:
                file.write(f"{row}\n")

    return note


@pytest.mark.parametrize("shard_bytes", [None, 2000])
def test_after_a_kill_the_same_call_goes_on(tmp_path: Path, shard_bytes: int | None) -> None:
    """At several moments one after the other; workers end with the process that began them."""
    out = tmp_path / "a.h5"
    context = multiprocessing.get_context("fork")
    for at in (17, 38):  # far apart: a worker may be some pieces ahead of the one that is killed
        alive, end = os.pipe()
        options = {"shard_bytes": shard_bytes, "processes": 2}
        packer = context.Process(target=packed, args=(out, Sentences(dies=_kill_packer(at))), kwargs=options)
        packer.start()
        os.close(end)
        packer.join()
        assert packer.exitcode == KILLED
        assert os.read(alive, 1) == b"", "nobody holds the other end of the pipe any more"
        os.close(alive)
        assert not out.exists()
        with pytest.raises(PackedUnreadable, match="no such file"):
            open_packed(out)
    done = packed(out, Sentences(dies=_write_down(tmp_path / "read")), shard_bytes=shard_bytes, processes=2)
    read = [int(row) for row in (tmp_path / "read").read_text().split()]
    assert done.num_resumed >= 16
    assert len(read) == NUMBER - done.num_resumed
    assert_whole(out, Sentences())


def test_an_end_that_fails_costs_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: said as what it is, nothing half-written under the name, and no row is read again."""
    out = tmp_path / "a.h5"

    def full(*words: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hdf_write.os, "pwrite", full)
        with pytest.raises(DiskFull, match="a.h5 cannot be written: No space left") as caught:
            packed(out)
    assert re.match(r"about [\d.]+ kB more are needed there, and .* are free: make room", caught.value.hint)
    assert caught.value.hint.endswith("type the same command: it goes on where it was")
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5.parts"]
    done = packed(out, Sentences(dies=_write_down(tmp_path / "read")))
    assert done.num_resumed == NUMBER
    assert (tmp_path / "read").read_text() == ""
    (tmp_path / "read").unlink()
    assert_whole(out, Sentences())


def test_bytes_that_are_still_needed() -> None:
    """Pieces stay until what they make up is written: data once more, or a shard of it."""
    assert bytes_left(100, None) == 200
    assert bytes_left(100, None, in_pieces=120) == 100
    assert bytes_left(100, 500, in_pieces=40) == 160
    assert bytes_left(100, 30) == 130
    assert bytes_left(100, 30, in_pieces=10, in_shards=60) == 60
    assert bytes_left(100, 30, in_shards=120) == 0


def test_a_disk_that_lies_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(descriptor: int, raw: Any, at: int) -> int:
        return len(raw)

    monkeypatch.setattr(hdf_write.os, "pwrite", lies)
    with pytest.raises(PackedUnreadable, match="is not what was written"):
        packed(tmp_path / "a.h5")
    assert not (tmp_path / "a.h5").exists()


def test_a_piece_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "a.h5"
    packer = multiprocessing.get_context("fork").Process(target=packed, args=(out, Sentences(dies=_kill_packer(39))))
    packer.start()
    packer.join()
    parts = sorted((tmp_path / "a.h5.parts").glob("*.npz"))
    assert len(parts) == 9
    os.truncate(parts[3], parts[3].stat().st_size // 2)
    assert read_piece(parts[3]) is None
    assert packed(out).num_resumed == 32
    assert_whole(out, Sentences())


def test_a_worker_that_is_killed_is_said(tmp_path: Path) -> None:
    def dies(row: int) -> None:
        if row == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDied) as caught:
        packed(tmp_path / "a.h5", Sentences(dies=dies), processes=2)
    assert "same command" in caught.value.hint


def test_what_is_there_is_not_replaced_by_accident(tmp_path: Path) -> None:
    out = tmp_path / "a.h5"
    packed(out, shard_bytes=2000)
    shards = sorted(tmp_path.glob("a-*.h5"))
    assert len(shards) > 3
    with pytest.raises(PackExists, match="a.h5 exists"):
        packed(out)
    packed(out, Sentences(20), shard_bytes=2000, force=True)
    assert_whole(out, Sentences(20))
    assert len(list(tmp_path.glob("a-*.h5"))) < len(shards), "shards that nothing stands for are gone"
    packed(out, Sentences(), force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5"]


def test_parts_of_other_data_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "a.h5"
    (tmp_path / "a.h5.parts").mkdir()
    (tmp_path / "a.h5.parts" / "plan.json").write_text("of something else")
    with pytest.raises(OtherParts) as caught:
        packed(out)
    assert "--force" in caught.value.hint
    packed(out, force=True)
    assert_whole(out, Sentences())


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
        patch.setattr(hdf_write.os, "pwrite", full)
        with pytest.raises(CannotWrite):
            packed(out, data)


def test_other_samples_are_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.h5"
    _stopped(out, Sentences(), monkeypatch)
    with pytest.raises(OtherParts, match="of other data, code or options"):
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


# -- what is packed --------------------------------------------------------------------------------------------------


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
