"""Maps of parts of files: the bytes that are there, read only, gone with the last view, no descriptor kept."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.packed import reader
from paceline.data.packed.mapping import available_bytes, mapped, stays_cached
from paceline.data.packed.reader import Packed, open_packed
from tests.data.packing import Sentences, packed

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


GIB = 1 << 30
needs_advice = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs large pages",
)


@pytest.mark.parametrize(
    ("num_bytes", "available", "expected"),
    [(0, 0, True), (1, 0, False), (8 * GIB, 16 * GIB, True), (8 * GIB + 1, 16 * GIB, False)],
)
def test_half_of_the_memory(num_bytes: int, available: int, expected: bool) -> None:
    assert stays_cached(num_bytes, available) is expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 24),
        ("0::/\n", {"memory.max": "max"}, 24),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": str(4 * GIB)}, 4),
        ("0::/job\n", {"job/memory.max": str(4 * GIB), "memory.max": str(3 * GIB)}, 3),
        ("0::/job\n", {"job/memory.max": str(64 * GIB)}, 24),
        ("0::/job\n", {"job/memory.max": str(16 * GIB), "job/memory.stat": f"anon {15 * GIB}\nfile {GIB}"}, 1),
        ("0::/job\n", {"job/memory.max": str(4 * GIB), "job/memory.stat": f"anon {5 * GIB}"}, 0),
        (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": f"{8 * GIB}", "memory/a/memory.stat": f"rss 1\ntotal_rss {6 * GIB}"},
            2,
        ),
        # version 1: a container sees its own group as the outermost one, under a name that leads nowhere
        ("5:cpu:/x\n4:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": str(2 * GIB)}, 2),
        ("4:hugetlb,memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, 24),
        ("3:cpu:/job\n", {"cpu/job/memory.limit_in_bytes": str(GIB), "job/memory.max": str(GIB)}, 24),
        ("1:name=a:b:/job\n0::/a:b\n", {"a:b/memory.max": str(GIB)}, 1),
    ],
)
def test_what_the_system_tells(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    proc, limits = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       {32 << 20} kB\nMemAvailable:   {24 << 20} kB\n")
    (proc / "self/cgroup").write_text(groups)
    for name, text in files.items():
        (limits / name).parent.mkdir(parents=True, exist_ok=True)
        (limits / name).write_text(f"{text}\n")
    assert available_bytes(proc, limits) == expected * GIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs /proc")
def test_no_more_than_this_machine_has() -> None:
    assert 0 < available_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_advised(path: Path) -> list[bool]:
    """Of each map of a file in this process, whether Linux was asked for large pages."""
    found, is_ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(f" {path}")
        elif is_ours and line.startswith("VmFlags:"):
            found.append("hg" in line.split())
    return found


def touched(data: Packed) -> list[Any]:
    """All rows of one stream: what has not been touched is not mapped."""
    return [data.stream("features").view(row) for row in range(len(data))]


@needs_advice
@pytest.mark.parametrize("is_kept", [True, False])
def test_only_what_stays_is_read_in_large_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """Of shards it is their sum that must fit: each of them does by far."""
    packed(tmp_path / "a.h5", shard_bytes=2000)
    data = open_packed(tmp_path / "a.h5")
    total = sum(file.streams["features"].nbytes for file in data.files)
    assert max(file.streams["features"].nbytes for file in data.files) < total // 2
    monkeypatch.setattr(reader, "available_bytes", lambda: 2 * total - (not is_kept))
    rows = touched(data)
    assert [is_advised(file.path) for file in data.files] == [[is_kept]] * len(data.files)
    for row, values in enumerate(rows):
        np.testing.assert_array_equal(values, Sentences()[row]["features"])


@pytest.mark.parametrize("in_large_pieces", [True, False])
def test_the_same_bytes_either_way_and_nothing_left_behind(tmp_path: Path, in_large_pieces: bool) -> None:
    content = np.random.default_rng(0).integers(0, 256, 5 << 20, dtype=np.uint8)
    path = tmp_path / "data.bin"
    path.write_bytes(content.tobytes())
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is read from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    open_before = os.listdir("/dev/fd")
    found = mapped(path, 4099, len(content) - 5000, in_large_pieces=in_large_pieces)
    np.testing.assert_array_equal(found[::-1], content[4099 : len(content) - 901][::-1])
    assert len(os.listdir("/dev/fd")) == len(open_before)


def test_systems_without_large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    (tmp_path / "data.bin").write_bytes(b"0123456789")
    assert mapped(tmp_path / "data.bin", 2, 5, in_large_pieces=True).tobytes() == b"23456"
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # a kernel that was built without them says EINVAL
    assert mapped(tmp_path / "data.bin", 2, 5, in_large_pieces=True).tobytes() == b"23456"


def test_a_file_cut_short_is_named_before_it_is_mapped(tmp_path: Path) -> None:
    """Reading past a file's end through a map ends the process: it must not come to that."""
    packed(tmp_path / "a.h5")
    read = (
        "import os, sys, paceline\n"
        "data = paceline.PackedDataset(sys.argv[1])\n"
        "os.truncate(sys.argv[1], 100)\n"
        "try:\n    data[0]\nexcept paceline.PacelineError as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", read, str(tmp_path / "a.h5")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "a.h5: has been changed since it was opened" in ran.stdout
