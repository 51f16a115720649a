"""Paceline trains PyTorch models at the speed of the hardware and gives the same answer everywhere.

Names are loaded on first use, so that `paceline --help` does not wait for torch; `__init__.pyi` says where each is.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

from paceline.core.version import VERSION

__version__ = VERSION


@functools.cache
def _modules() -> dict[str, str]:
    """Return the public names, and the module of each."""
    stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    return {name: module for module, name in re.findall(r"^from ([\w.]+) import (\w+) as", stub, re.MULTILINE)}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_modules())
    if name.startswith("_") or name not in _modules():
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_modules()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
