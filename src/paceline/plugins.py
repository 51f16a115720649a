"""What packages that extend Paceline import, beside `paceline.Task`, `Callback` and `World`: see docs/plugins.md."""

from __future__ import annotations

from paceline.observe.callback import RunInfo
from paceline.observe.loggers import PointLogger
from paceline.optim.schedule import Schedule, Span

__all__ = ["PointLogger", "RunInfo", "Schedule", "Span"]
