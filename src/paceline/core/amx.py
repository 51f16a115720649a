"""Matrix units (AMX) that a virtual machine announces but does not describe, which end a process in bf16 on its CPU.

oneDNN reads the sizes of AMX's tiles from CPUID leaf 0x1D. Some hypervisors (Firecracker, seen with a guest of Linux
6.18) pass the flags `amx_tile` and `amx_bf16` on and leave that leaf empty: oneDNN then configures tiles of no size,
and the first product in bf16 ends the process with SIGILL, without a message. There oneDNN is kept to the vector
units, which have bf16 and fp16, too, by its own variable ONEDNN_MAX_CPU_ISA, unless the user has set it. oneDNN reads
it once, at its first product, so it is set when the precisions of a CPU are first asked for.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
"""The highest instruction set of oneDNN before AMX, with bf16 and fp16 in vectors."""
_TILE_SIZES = 0x1D, 1
"""CPUID's leaf and sub-leaf of the first palette of tiles; all zero where a hypervisor hides it."""
_CODE = bytes.fromhex("53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")
"""void cpuid(uint32 leaf, uint32 sub_leaf, uint32 registers[4]) of x86-64: eax, ebx, ecx, edx."""
_HEAD = 8192
"""Bytes of /proc/cpuinfo that hold the flags of the first core."""


@functools.cache
def avoid_undescribed() -> None:
    """Keep oneDNN from AMX where its tiles are not described, in this process and those that it starts."""
    if VARIABLE not in os.environ and "amx_tile" in cpu_flags() and is_undescribed():
        os.environ[VARIABLE] = WITHOUT_AMX


def is_undescribed() -> bool:
    """Return True if CPUID describes no tiles, asked in a child process: the answer takes machine code of our own."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not sys.executable:
        return False
    child = subprocess.run([sys.executable, "-I", "-S", __file__], capture_output=True, text=True, check=False)
    registers = child.stdout.split()
    return child.returncode == 0 and registers != [] and not any(map(int, registers))


def is_avoided() -> bool:
    """Return True if this CPU announces AMX and oneDNN is kept from it, by this or by a user who set its variable."""
    return "amx_tile" in cpu_flags() and os.environ.get(VARIABLE) == WITHOUT_AMX


def cpu_flags() -> frozenset[str]:
    """Return the features of the first core by Linux's names; none where it does not say."""
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            head = file.read(_HEAD)
    except OSError:
        return frozenset()
    line = next((line for line in head.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def cpuid(leaf: int, sub_leaf: int) -> tuple[int, ...] | None:
    """Return eax, ebx, ecx and edx of x86-64's instruction; None where a process may not make code of its own."""
    import ctypes  # only in the child
    import mmap

    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a hardened kernel
        return None
    page.write(_CODE)
    registers = (ctypes.c_uint32 * 4)()
    code = ctypes.c_char.from_buffer(page)
    function = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(ctypes.addressof(code))
    function(leaf, sub_leaf, ctypes.addressof(registers))
    del function, code  # the page can be closed once nothing points into it
    page.close()
    return tuple(registers)


if __name__ == "__main__":
    print(*cpuid(*_TILE_SIZES) or ())
