"""Packing: killed at any moment it goes on where it was, and what it writes is whole or not there."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.disk import DiskFull
from paceline.core.errors import AlreadyExists, Failed
from paceline.data.packed import from_samples
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.from_samples import SampleSource
from paceline.data.packed.pack import PackExists, bytes_left
from paceline.data.packed.piece import read_piece
from paceline.data.packed.reader import open_packed
from tests.crash import KILLED, TIMEOUT_S
from tests.data.packing import NUMBER, Sentences, assert_whole, packed

ROWS = 4
"""Rows of a piece."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_samples, "ROWS_AT_ONCE", ROWS)


def _kill_packer(at: int, end: int = NUMBER, beyond: Any = None) -> Callable[[int], None]:
    """Before row `at` is read by whichever process that the one which packs began, that one is gone.

    `beyond` is an event for two such processes: none reads past `end`, where the piece of that row ends, and the other
    has made all pieces before it when the packer is killed. So it is known which pieces are there, however slow either
    is.
    """
    not_to_kill = os.getpid()

    def dies(row: int) -> None:
        if os.getppid() == not_to_kill:
            return  # the packer itself looks at its data
        if row >= end:
            beyond.set()
            signal.pause()
        if row == at:
            assert beyond is None or beyond.wait(TIMEOUT_S)
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()  # until this one is gone, too

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
    pieces = SampleSource(Sentences(), range(NUMBER), name="test").cuts(shard_bytes)
    for at in (17, 30):
        (piece,) = [rows for rows in pieces if at in rows]
        alive, end = os.pipe()
        options = {"shard_bytes": shard_bytes, "processes": 2}
        data = Sentences(dies=_kill_packer(at, piece.stop, context.Event()))
        packer = context.Process(target=packed, args=(out, data), kwargs=options)
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
    assert done.num_resumed == piece.start
    assert len(read) == NUMBER - done.num_resumed
    assert_whole(out, Sentences())


def test_an_end_that_fails_costs_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: said as what it is, nothing half-written under the name, and no row is read again."""
    out = tmp_path / "a.h5"

    def full(*words: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
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

    monkeypatch.setattr(os, "pwrite", lies)
    with pytest.raises(PackedUnreadable, match="is not what was written"):
        packed(tmp_path / "a.h5")
    assert not (tmp_path / "a.h5").exists()


def test_a_piece_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "a.h5"
    packer = multiprocessing.get_context("fork").Process(
        target=packed, args=(out, Sentences(dies=_kill_packer(39))), kwargs={"processes": 1}
    )
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

    with pytest.raises(Failed, match="was killed") as caught:
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
    with pytest.raises(AlreadyExists, match="parts of an unfinished packing") as caught:
        packed(out)
    assert "--force" in caught.value.hint
    packed(out, force=True)
    assert_whole(out, Sentences())
