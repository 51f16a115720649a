"""Maps of parts of files: the bytes that are there, read only, gone with the last view, no descriptor kept."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.data.packed.mapping import mapped

CONTENT = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "data.bin"
    found.write_bytes(CONTENT.tobytes())
    return found


either_way = pytest.mark.parametrize("in_large_pieces", [False, True])


@either_way
@pytest.mark.parametrize(("offset", "number"), [(0, 20_000), (1, 7), (4096, 4096), (5000, 1), (4095, 15_905)])
def test_the_bytes_of_the_file(path: Path, offset: int, number: int, in_large_pieces: bool) -> None:
    found = mapped(path, offset, number, in_large_pieces=in_large_pieces)
    assert np.array_equal(found, CONTENT[offset : offset + number])


def test_other_types_at_any_place(path: Path) -> None:
    expected = np.frombuffer(CONTENT.tobytes()[3:4003], np.int16)
    assert np.array_equal(mapped(path, 3, 4000).view(np.int16), expected)


@either_way
def test_it_cannot_be_written_to(path: Path, in_large_pieces: bool) -> None:
    found = mapped(path, 0, 100, in_large_pieces=in_large_pieces)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        found.view(np.int16)[:3] = 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@either_way
def test_mapped_while_a_view_is_held_and_never_open(path: Path, in_large_pieces: bool) -> None:
    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    open_before = len(os.listdir("/proc/self/fd"))
    found = mapped(path, 8192, 1000, in_large_pieces=in_large_pieces)
    view = found.view(np.int16)[10:20]
    del found
    assert is_mapped()
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert np.array_equal(view, np.frombuffer(CONTENT[8192:9192].tobytes(), np.int16)[10:20])
    del view
    assert not is_mapped()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mapped(tmp_path / "gone", 0, 10)


@either_way
def test_what_the_system_refuses(path: Path, in_large_pieces: bool) -> None:
    with pytest.raises(OSError, match=r"data\.bin") as caught:
        mapped(path, 0, 2**62, in_large_pieces=in_large_pieces)
    assert caught.value.errno in (errno.ENOMEM, errno.EOVERFLOW, errno.EINVAL)


def address_space() -> int:
    """Pages, of whatever kind, that this process has taken."""
    return int(Path("/proc/self/statm").read_text().split()[0])


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """What can be opened, as somebody writes to it, and not mapped."""
    found = tmp_path / "pipe"
    os.mkfifo(found)
    held = os.open(found, os.O_RDWR)
    yield found
    os.close(held)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@either_way
def test_no_address_space_is_kept(path: Path, pipe: Path, in_large_pieces: bool) -> None:
    """Neither what lies around a map to put it in its place, nor that of one that could not be made."""
    for num_files in (10, 400):  # the first ones for what Python itself takes
        before = address_space()
        for _ in range(num_files):
            assert mapped(path, 4096, 5, in_large_pieces=in_large_pieces)[0] == CONTENT[4096]
            with pytest.raises(OSError, match="pipe"):
                mapped(pipe, 0, 5, in_large_pieces=in_large_pieces)
    assert address_space() - before < 400 * 512 // 2, "2 MB for each"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs large pages")
@pytest.mark.parametrize("offset", [0, 4096, 3 << 20])
def test_large_pieces_are_not_mapped_as_large_pages(tmp_path: Path, offset: int) -> None:
    """Linux does so only where address and place in the file agree up to 2 MB."""
    (tmp_path / "large.bin").write_bytes(bytes(8 << 20))
    found = mapped(tmp_path / "large.bin", offset, 4 << 20, in_large_pieces=True)
    assert (found.ctypes.data - offset) % (2 << 20) != 0
    assert not found.any()
    lines = Path("/proc/self/smaps").read_text().split("large.bin")[1].splitlines()
    assert next(line.split()[1] for line in lines if line.startswith("FilePmdMapped:")) == "0"
