"""Optional packages that are installed."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Return True if kernels can be compiled for a GPU; cached, since optimizers ask at every step."""
    return importlib.util.find_spec("triton") is not None
