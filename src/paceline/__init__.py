"""Paceline trains PyTorch models at the speed of the hardware and gives the same answer everywhere.

Names are loaded on first use, so that `paceline --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.core.version import VERSION

if TYPE_CHECKING:
    from paceline.cli.average import Averaged as Averaged
    from paceline.cli.average import average as average
    from paceline.config.settings import TrainConfig as TrainConfig
    from paceline.core.errors import PacelineError as PacelineError
    from paceline.data.collate import pad_collate as pad_collate
    from paceline.data.grain import Batch as Batch
    from paceline.data.grain import Grain as Grain
    from paceline.data.packed.dataset import PackedDataset as PackedDataset
    from paceline.lab.compare.command import compare as compare
    from paceline.lab.compare.comparison import Comparison as Comparison
    from paceline.lab.predict.api import predict as predict
    from paceline.lab.predict.prediction import Prediction as Prediction
    from paceline.lab.sweep.api import sweep as sweep
    from paceline.lab.sweep.outcome import SweepResult as SweepResult
    from paceline.observe.callback import Callback as Callback
    from paceline.observe.callback import Watcher as Watcher
    from paceline.train.engine import Engine as Engine
    from paceline.train.fit import fit as fit
    from paceline.train.load import load as load
    from paceline.train.metrics import Gathered as Gathered
    from paceline.train.task import Stage as Stage
    from paceline.train.task import Task as Task
    from paceline.train.trainer import Result as Result
    from paceline.world.discover.environment import World as World

__version__ = VERSION

_HOMES = {
    "average": "paceline.cli.average",
    "Averaged": "paceline.cli.average",
    "compare": "paceline.lab.compare.command",
    "Comparison": "paceline.lab.compare.comparison",
    "load": "paceline.train.load",
    "predict": "paceline.lab.predict.api",
    "Prediction": "paceline.lab.predict.prediction",
    "sweep": "paceline.lab.sweep.api",
    "SweepResult": "paceline.lab.sweep.outcome",
    "PacelineError": "paceline.core.errors",
    "TrainConfig": "paceline.config.settings",
    "pad_collate": "paceline.data.collate",
    "Batch": "paceline.data.grain",
    "Grain": "paceline.data.grain",
    "PackedDataset": "paceline.data.packed.dataset",
    "Callback": "paceline.observe.callback",
    "Watcher": "paceline.observe.callback",
    "Engine": "paceline.train.engine",
    "fit": "paceline.train.fit",
    "Gathered": "paceline.train.metrics",
    "Stage": "paceline.train.task",
    "Task": "paceline.train.task",
    "Result": "paceline.train.trainer",
    "World": "paceline.world.discover.environment",
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
