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


def mapped(path: Path, offset: int, num_bytes: int, *, in_large_pieces: bool = False) -> NDArray[np.uint8]:
    """Bytes of a file, to be read only. They stay mapped as long as the array, or a view of it, is held.

    `in_large_pieces`: what is not in memory is read by megabytes into pages as large, wherever it is touched. In random
    order it comes in pages of 4 KB otherwise: that takes more than twice as long, and copies out of them take longer too.
    """
    before = offset % mmap.ALLOCATIONGRANULARITY
    length = before + num_bytes
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset - before)
    finally:
        os.close(descriptor)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    if in_large_pieces and hasattr(mmap, "MADV_HUGEPAGE"):
        _libc.madvise(address, length, mmap.MADV_HUGEPAGE)  # advice: where it is not taken, all else is the same
    room: Any = (ctypes.c_ubyte * length).from_address(address)
    # Not at exit: another thread may still be reading, and the system unmaps everything anyway.
    weakref.finalize(room, _libc.munmap, address, length).atexit = False
    found: NDArray[np.uint8] = np.frombuffer(room, np.uint8, num_bytes, before)
    found.flags.writeable = False
    return found
