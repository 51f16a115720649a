"""Device of a benchmark: a GPU, or a CPU for a dry run with tiny sizes: the same code, but nothing is measured."""

from __future__ import annotations

import argparse
import gc
import sys
import time

import torch

from paceline.speed.autotune.candidates import Candidate
from paceline.train.autotune import timing

Device = torch.device | str


def add_device(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run, no figures")


def announce(device: Device) -> None:
    """Say so where figures mean nothing; say at once, not after an import of minutes, that there is no GPU."""
    if is_cuda(device):
        if not torch.cuda.is_available():
            raise SystemExit("PyTorch sees no GPU here; `--device cpu` with tiny sizes is a dry run")
    else:
        print("dry run on a CPU: no figures", file=sys.stderr, flush=True)


def is_cuda(device: Device) -> bool:
    return torch.device(device).type == "cuda"


def wait(device: Device) -> None:
    """Return when the device has done what was launched."""
    if is_cuda(device):
        torch.cuda.synchronize()


def clear(device: Device) -> None:
    """Free what the last way held, compiled code included, and count memory anew."""
    gc.collect()
    torch.compiler.reset()
    if is_cuda(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: Device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if is_cuda(device) else 0.0


def candidate(name: str, device: Device) -> Candidate:
    """Return the way that `O2+kernels+graphs` names; in a dry run the plainest, which every CPU has."""
    level, *more = name[1:].split("+")
    return Candidate(int(level), "kernels" in more, "graphs" in more) if is_cuda(device) else Candidate(0)


def compile_kernels(way: Candidate, workload: timing.Workload) -> None:
    """Compile in threads, as a run does, what would be compiled one after the other when it is launched."""
    if way.kernels:
        began = time.perf_counter()
        timing.compile_kernels(way, lambda done, total: None, workload=workload)
        print(f"  kernels compiled in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
