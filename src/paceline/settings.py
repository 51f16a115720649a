"""Types for settings of a task's own: limits, and marks of those that do not change what is computed."""

from __future__ import annotations

from paceline.config.settings import (
    DataSettings,
    EngineConfig,
    Fraction,
    GroupSettings,
    OptimSettings,
    Positive,
    PositiveFloat,
    Section,
    TrainConfig,
    free,
    per_rank,
)

__all__ = [
    "DataSettings",
    "EngineConfig",
    "Fraction",
    "GroupSettings",
    "OptimSettings",
    "Positive",
    "PositiveFloat",
    "Section",
    "TrainConfig",
    "free",
    "per_rank",
]
