"""Paceline trains PyTorch models at the speed of the hardware and gives the same answer everywhere.

Names are loaded on first use, so that `paceline --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config.errors import PacelineError as PacelineError
    from paceline.config.settings import TrainConfig as TrainConfig

__version__ = "0.1.0"

_HOMES = {
    "PacelineError": "paceline.config.errors",
    "TrainConfig": "paceline.config.settings",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
