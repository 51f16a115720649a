"""One GPU for several processes at the same time instead of in turns, through NVIDIA's MPS where that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def shared_gpu(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of processes that share the GPU; this one's own where there is no MPS."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield dict(os.environ)
        return
    folders = {"CUDA_MPS_PIPE_DIRECTORY": folder / "mps", "CUDA_MPS_LOG_DIRECTORY": folder / "mps-log"}
    for path in folders.values():
        path.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **{name: str(path.resolve()) for name, path in folders.items()}}
    subprocess.run([control, "-d"], env=environment, check=False)
    try:
        yield environment
    finally:
        with suppress(subprocess.TimeoutExpired):  # figures matter more
            subprocess.run([control], input=b"quit\n", env=environment, check=False, timeout=20)
