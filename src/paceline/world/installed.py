"""Which packages that a feature needs are installed."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled for a GPU; asked once, since optimizers ask at every step."""
    return importlib.util.find_spec("triton") is not None
