"""Public names for plugin packages, besides `paceline.Task`, `Callback` and `World`: see docs/plugins.md."""

from __future__ import annotations

from paceline.core.plugins import Command
from paceline.observe.callback import RunInfo
from paceline.observe.loggers import PointLogger
from paceline.optim.schedule import Schedule, Span

__all__ = ["Command", "PointLogger", "RunInfo", "Schedule", "Span"]
