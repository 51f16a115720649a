"""Reading ahead: every byte once, from where it began, and no further than was asked for."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from paceline.data import read_ahead
from paceline.data.read_ahead import CHUNK, TIMES, ReadAhead, Span, from_there_on, is_in_memory


@pytest.mark.parametrize(("number", "begin"), [(0, 3), (0, 10), (1, 0), (2, 5), (2, 9)])
def test_every_byte_once(number: int, begin: int) -> None:
    spans = [Span(Path("a"), 3, 10), Span(Path("b"), 0, 4), Span(Path("c"), 5, 9)]
    found = [(part.path, at) for part in from_there_on(spans, number, begin) for at in range(part.begin, part.end)]
    assert sorted(found) == sorted((span.path, at) for span in spans for at in range(span.begin, span.end))
    if begin < spans[number].end:
        assert found[0] == (spans[number].path, begin)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of four chunks that is on the disk alone."""
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(4 * CHUNK))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(chunks_in_memory(path)):
        pytest.skip("this file system keeps what it is told to drop")
    return path


def chunks_in_memory(path: Path) -> list[bool]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return [is_in_memory(descriptor, at) for at in range(0, 4 * CHUNK, CHUNK)]
    finally:
        os.close(descriptor)


def test_the_whole_file_comes_into_memory(cold: Path) -> None:
    ahead: ReadAhead = pickle.loads(pickle.dumps(ReadAhead([Span(cold, 0, 4 * CHUNK)])))
    ahead.asked(0, 2 * CHUNK, CHUNK)
    if not any(chunks_in_memory(cold)):
        pytest.skip("this file system does not say what is in memory")
    assert all(chunks_in_memory(cold))


def test_no_further_than_a_multiple_of_what_is_asked_for(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sent = os.preadv, []

    def preadv(descriptor: int, rooms: list[bytearray], at: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError  # not in memory
        sent.append(at // CHUNK)
        return read(descriptor, rooms, at, flags)

    monkeypatch.setattr(read_ahead.os, "preadv", preadv)
    ahead = ReadAhead([Span(cold, 0, 4 * CHUNK)])
    ahead.asked(0, CHUNK, CHUNK // TIMES)
    assert sent == [1]
    ahead.asked(0, 3 * CHUNK, 2 * CHUNK // TIMES)
    assert sent == [1, 2, 3]
    ahead.asked(0, 0, CHUNK)
    ahead.asked(0, 0, CHUNK)
    assert sent == [1, 2, 3, 0]  # everything once


def test_a_forked_process_begins_anew(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = ReadAhead([Span(cold, 0, 4 * CHUNK)])
    ahead.asked(0, 0, CHUNK)
    monkeypatch.setattr(read_ahead, "read_in_order", lambda spans: iter([len(spans)]))
    monkeypatch.setattr(read_ahead.os, "getpid", lambda: -1)
    ahead.asked(0, CHUNK, 100)
    assert list(ahead._steps) == []
    assert ahead._process == -1


def test_not_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "read_in_order", lambda spans: iter([7]))
    for available in (8 * CHUNK, 8 * CHUNK - 2):
        ahead = ReadAhead([Span(Path("any"), 0, 4 * CHUNK)])
        monkeypatch.setattr(read_ahead, "available_bytes", lambda available=available: available)
        ahead.asked(0, 0, 0)
        assert (next(ahead._steps, None) == 7) == (available == 8 * CHUNK)


def test_a_file_that_is_gone_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    ahead = ReadAhead([Span(tmp_path / "gone", 0, CHUNK)])
    ahead.asked(0, 0, 100)
    assert list(ahead._steps) == []
