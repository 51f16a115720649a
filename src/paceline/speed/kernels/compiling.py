"""Compilation of Triton kernels in threads, before they are needed: a network asks for dozens, one after the other.

`dry()` is a context in which kernels are compiled instead of launched. Code that runs in it sees tensors of the right
shapes with arbitrary values, and must not decide by them. Triton's compiler spends its time outside of Python's lock,
so that threads share the cores; what they make is found in Triton's own caches by the launches that follow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
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
