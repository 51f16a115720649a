"""A part of a file mapped into memory as an array, without an open descriptor, and the page cache behind it.

Python's own maps keep the file open until 3.13, so that a corpus of a thousand shards runs out of descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARE = 1 / 2
"""Share of the available memory that the files of one stream may take and still be expected to stay in it."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE, _MAP_FIXED = 0, 0x10  # which Python does not name
_PIECE = 2 << 20
"""Bytes of a large page."""
_OUT_OF_STEP = mmap.PAGESIZE


def mapped(path: Path, offset: int, num_bytes: int, *, in_large_pieces: bool = False) -> NDArray[np.uint8]:
    """Map bytes of a file, read-only. They stay mapped as long as the array, or a view of it, is held.

    `in_large_pieces`: pages that are not in memory are read by megabytes into pages as large, wherever they are
    touched. In random order they come in pages of 4 KB otherwise: that takes more than twice as long, and copies take
    longer too. It pays only for files that stay in the page cache (`stays_cached`).
    """
    before = offset % mmap.ALLOCATIONGRANULARITY
    length = before + num_bytes
    place = _in_large_pieces if in_large_pieces and hasattr(mmap, "MADV_HUGEPAGE") else _as_it_comes
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address, reserved, num_reserved = place(descriptor, offset - before, length)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
    buffer: Any = (ctypes.c_ubyte * length).from_address(address)
    # Not at exit: another thread may still be reading, and the system unmaps everything anyway.
    weakref.finalize(buffer, _libc.munmap, reserved, num_reserved).atexit = False
    array: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, num_bytes, before)
    array.flags.writeable = False
    return array


def stays_cached(num_bytes: int, available_bytes: int) -> bool:
    """Return True if the page cache can hold this much beside everything else."""
    return num_bytes <= SHARE * available_bytes


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process and the page cache may take; 0 where the system does not tell.

    Pages that hold files count as free, so that it is the same before and after a file was read.
    """
    room = [int(line.split()[1]) << 10 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    # The page cache counts towards the limit of the job or container that reads.
    for name in memory_limits(_lines(proc / "self/cgroup")):
        used = _used(_lines((groups / name).with_name("memory.stat")))
        room += [max(0, int(line) - used) for line in _lines(groups / name) if line.isdigit()]
    return min(room, default=0)


def memory_limits(lines: list[str]) -> Iterator[PurePosixPath]:
    """Yield the files that may hold a limit, given `/proc/self/cgroup`: of the group itself and of all around it."""
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if kinds else ("", "memory.max")
        group = PurePosixPath(path.lstrip("/"))
        for around in (group, *group.parents):
            yield folder / around / name


def _used(lines: list[str]) -> int:
    """Return the bytes of a group that no page cache can have, by its `memory.stat`; cgroup v1 calls them `rss`."""
    counts = dict(line.split(maxsplit=1) for line in lines)
    return int(counts.get("anon") or counts.get("total_rss") or 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _as_it_comes(descriptor: int, offset: int, length: int) -> tuple[int, int, int]:
    """Return (address of the bytes, address of the room that they take, its size)."""
    address = _mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
    return address, address, length


def _in_large_pieces(descriptor: int, offset: int, length: int) -> tuple[int, int, int]:
    """Map with large pages in the cache and small ones in the map: its addresses are out of step with the large ones.

    Where a virtual machine's own pages are small, a large one in the map is filled in by the host 4 KB at a time.
    """
    num_reserved = length + _PIECE
    reserved = _mmap(None, num_reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = reserved + (offset + _OUT_OF_STEP - reserved) % _PIECE
    try:
        _mmap(address, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset)
    except OSError:
        _libc.munmap(reserved, num_reserved)
        raise
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE)  # advice: where it is not taken, all else is the same
    return address, reserved, num_reserved


def _mmap(address: int | None, length: int, rights: int, flags: int, descriptor: int, offset: int) -> int:
    result: int = _libc.mmap(address, length, rights, flags, descriptor, offset)
    if result == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
