"""A part of a file as an array, mapped into memory, and no descriptor kept.

Python's own maps keep the file open until 3.13, so that a corpus of a thousand shards runs out of descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Bytes of a file, to be read only. They stay mapped as long as the array, or a view of it, is held.

    `in_large_pieces`: what is not in memory is read by megabytes into pages as large, wherever it is touched. In random
    order it comes in pages of 4 KB otherwise: that takes more than twice as long, and copies take longer too.
    """
    before = offset % mmap.ALLOCATIONGRANULARITY
    length = before + num_bytes
    place = _in_large_pieces if in_large_pieces and hasattr(mmap, "MADV_HUGEPAGE") else _as_it_comes
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address, taken, num_taken = place(descriptor, offset - before, length)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
    room: Any = (ctypes.c_ubyte * length).from_address(address)
    # Not at exit: another thread may still be reading, and the system unmaps everything anyway.
    weakref.finalize(room, _libc.munmap, taken, num_taken).atexit = False
    found: NDArray[np.uint8] = np.frombuffer(room, np.uint8, num_bytes, before)
    found.flags.writeable = False
    return found


def _as_it_comes(descriptor: int, offset: int, length: int) -> tuple[int, int, int]:
    """(where the bytes are, where the room that they take begins, its size)"""
    address = _mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
    return address, address, length


def _in_large_pieces(descriptor: int, offset: int, length: int) -> tuple[int, int, int]:
    """Large pages in the cache, and small ones in the map: its addresses are out of step with the large ones.

    Where a virtual machine's own pages are small, a large one in the map is filled in by the host 4 KB at a time.
    """
    num_taken = length + _PIECE
    taken = _mmap(None, num_taken, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = taken + (offset + _OUT_OF_STEP - taken) % _PIECE
    try:
        _mmap(address, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset)
    except OSError:
        _libc.munmap(taken, num_taken)
        raise
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE)  # advice: where it is not taken, all else is the same
    return address, taken, num_taken


def _mmap(address: int | None, length: int, rights: int, flags: int, descriptor: int, offset: int) -> int:
    found: int = _libc.mmap(address, length, rights, flags, descriptor, offset)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
