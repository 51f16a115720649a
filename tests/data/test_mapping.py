"""Maps of parts of files: the bytes that are there, read only, gone with the last view, no descriptor kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.data.mapping import mapped

CONTENT = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "data.bin"
    found.write_bytes(CONTENT.tobytes())
    return found


@pytest.mark.parametrize(("offset", "number"), [(0, 20_000), (1, 7), (4096, 4096), (5000, 1), (4095, 15_905)])
def test_the_bytes_of_the_file(path: Path, offset: int, number: int) -> None:
    assert np.array_equal(mapped(path, offset, number), CONTENT[offset : offset + number])


def test_other_types_at_any_place(path: Path) -> None:
    expected = np.frombuffer(CONTENT.tobytes()[3:4003], np.int16)
    assert np.array_equal(mapped(path, 3, 4000).view(np.int16), expected)


def test_it_cannot_be_written_to(path: Path) -> None:
    found = mapped(path, 0, 100)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        found.view(np.int16)[:3] = 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_mapped_while_a_view_is_held_and_never_open(path: Path) -> None:
    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    open_before = len(os.listdir("/proc/self/fd"))
    found = mapped(path, 8192, 1000)
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


def test_what_the_system_refuses(path: Path) -> None:
    with pytest.raises(OSError, match=r"data\.bin") as caught:
        mapped(path, 0, 2**62)
    assert caught.value.errno in (errno.ENOMEM, errno.EOVERFLOW, errno.EINVAL)
