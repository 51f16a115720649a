"""Two packings of one file at the same time: the second is told of the first, and disturbs nothing."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.core.errors import Busy
from paceline.data.packed import from_samples, parts
from paceline.data.packed.pack import PackExists
from paceline.data.packed.parts import locked
from tests.crash import KILLED
from tests.data.packing import NUMBER, Sentences, assert_whole, packed

_fork = multiprocessing.get_context("fork")
OPTIONS = {"shard_bytes": 2000, "processes": 1}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_samples, "ROWS_AT_ONCE", 4)


@contextmanager
def another(out: Path) -> Iterator[int]:
    """A process that packs, and waits at row 30 of 40 for as long as this lasts; its pid."""
    is_there, says_so = os.pipe()
    waits, may_go_on = os.pipe()
    not_here = os.getpid()

    def stops(row: int) -> None:
        if row == 30 and os.getppid() != not_here:
            os.write(says_so, b"x")
            os.read(waits, 1)

    def packs() -> None:
        os.close(may_go_on)
        packed(out, Sentences(dies=stops), **OPTIONS)

    packer = _fork.Process(target=packs)
    packer.start()
    assert packer.pid is not None
    assert os.read(is_there, 1) == b"x"
    try:
        yield packer.pid
    finally:
        os.close(may_go_on)
        packer.join()
        for descriptor in (is_there, says_so, waits):
            os.close(descriptor)
        assert packer.exitcode in (0, KILLED)


@pytest.mark.parametrize("force", [False, True])
def test_the_second_is_told_of_the_first(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "a.h5"
    with another(out) as pid:
        before = (tmp_path / "a.h5.parts" / "plan.json").read_text()
        with pytest.raises(Busy, match=f"a.h5 is being written by another `paceline pack`: pid {pid} on .*, since 20"):
            packed(out, force=force, **OPTIONS)
        assert (tmp_path / "a.h5.parts" / "plan.json").read_text() == before
    assert_whole(out, Sentences())
    with pytest.raises(PackExists):
        packed(out, **OPTIONS)


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    """Killed, and with its workers still there."""
    out = tmp_path / "a.h5"
    with another(out) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert 16 <= packed(out, **OPTIONS).num_resumed < NUMBER
    assert_whole(out, Sentences())


def test_a_lock_of_a_file_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who held it removes it with the folder: another may have opened it before, and gets it then."""
    out, folder = tmp_path / "a.h5", tmp_path / "a.h5.parts"
    real = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (folder / parts.LOCK).unlink()
        folder.rmdir()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(out, folder):
        assert f"pid {os.getpid()} on " in (folder / parts.LOCK).read_text()
        with pytest.raises(Busy, match="is being written by another"):
            locked(out, folder).__enter__()
    assert not folder.exists()
