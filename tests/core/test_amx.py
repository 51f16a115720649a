"""AMX that a virtual machine announces without the sizes of its tiles."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from paceline.core import amx


@pytest.mark.parametrize(
    ("variable", "flags", "is_undescribed", "expected"),
    [
        (None, {"amx_tile", "amx_bf16"}, True, amx.WITHOUT_AMX),
        ("AVX2", {"amx_tile", "amx_bf16"}, True, "AVX2"),  # the user's choice stays
        (None, {"amx_tile", "amx_bf16"}, False, None),
        (None, {"avx2"}, True, None),
    ],
)
def test_tiles_without_sizes(
    variable: str | None, flags: set[str], is_undescribed: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(amx, "is_undescribed", lambda: is_undescribed)
    monkeypatch.setenv(amx.VARIABLE, variable or "")
    if variable is None:
        monkeypatch.delenv(amx.VARIABLE)
    amx.avoid_undescribed.__wrapped__()
    assert os.environ.get(amx.VARIABLE) == expected


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="CPUID is of x86")
def test_the_child_reads_what_this_process_reads() -> None:
    tiles = amx.cpuid(0x1D, 1)
    assert amx.is_undescribed() == (tiles is not None and not any(tiles))


def test_importing_paceline_changes_no_variable() -> None:
    program = "import os; before = dict(os.environ); import paceline; print(dict(os.environ) == before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "True")


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="CPUID is of x86")
def test_cpuid_is_the_cpu_of_proc() -> None:
    """Leaf 7, ebx: bit 5 is AVX2, bit 16 AVX-512; leaf 0 spells the vendor."""
    vendor = amx.cpuid(0, 0)
    assert vendor is not None
    name = b"".join(part.to_bytes(4, "little") for part in (vendor[1], vendor[3], vendor[2])).decode()
    with open("/proc/cpuinfo", encoding="ascii") as file:
        assert any(line.startswith("vendor_id") and name in line for line in file)
    features, flags = amx.cpuid(7, 0), amx.cpu_flags()
    assert features is not None
    assert bool(features[1] >> 5 & 1) == ("avx2" in flags)
    assert bool(features[1] >> 16 & 1) == ("avx512f" in flags)


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [({"amx_tile"}, amx.WITHOUT_AMX, True), ({"amx_tile"}, "ALL", False), ({"avx2"}, amx.WITHOUT_AMX, False)],
)
def test_what_is_avoided(flags: set[str], variable: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setenv(amx.VARIABLE, variable)
    assert amx.is_avoided() == expected


def test_products_in_bf16_do_not_end_the_process() -> None:
    """Without the guard the child ends by SIGILL on such a machine."""
    program = (
        "import torch\n"
        "from paceline.speed.precision import capabilities\n"
        "capabilities(torch.device('cpu'))\n"
        "x = torch.randn(64, 64, dtype=torch.float32).to(torch.bfloat16)\n"
        "print(float((x @ x).float().sub(x.float() @ x.float()).abs().max()) < 1)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != amx.VARIABLE}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "True")
