"""Compilation of Triton kernels in threads, before they are needed: a network asks for dozens, one after the other.

`dry()` is a context in which kernels are compiled instead of launched. Code that runs in it sees tensors of the right
shapes with arbitrary values, and must not decide by them. Triton's compiler spends its time outside of Python's lock,
so that threads share the cores; what they make is found in Triton's own caches by the launches that follow.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch

MOST_THREADS = 16
Shown = Callable[[int, int], None]
"""Called with the number of kernels that are compiled, and that of all."""


def can_run_dry() -> bool:
    """Return True if this Triton has what `dry` uses, which is partly private; else kernels compile when launched."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:
        return False
    return callable(AsyncCompileMode) and callable(JITFunction.run)


def load_early(device: torch.device) -> Thread:
    """Load in a thread, while a model is built, what the first launches on a device wait for; return the thread.

    That is Triton's digest of its own files, by which it names what it has compiled, and the library of products.
    What cannot be loaded is left to whoever needs it, and so is the complaint.
    """

    def load() -> None:
        with suppress(Exception):
            cache = importlib.import_module("triton.runtime.cache")
            cache.triton_key()
        with suppress(Exception):
            square = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(square, square)

    thread = Thread(target=load, name="load early", daemon=True)
    thread.start()
    return thread


@contextmanager
def dry(shown: Shown = lambda done, total: None, num_threads: int | None = None) -> Iterator[None]:
    """Compile the kernels that are launched in here, and launch none. Failures are left to the real launches.

    Backward runs in this thread meanwhile. Not for use beside other threads that launch kernels.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    threads = num_threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)
        JITFunction.run = compile_only
        try:
            with mode, torch.autograd.set_multithreading_enabled(False):
                try:
                    yield
                finally:
                    JITFunction.run = launch
                    futures = list(mode.raw_futures)
                    for done, _ in enumerate(as_completed(futures), 1):
                        shown(done, len(futures))
        finally:
            JITFunction.run = launch
