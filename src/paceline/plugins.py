"""Public names for plugin packages, besides `paceline.Task`, `Callback` and `World`: see docs/plugins.md."""

from __future__ import annotations

from paceline.config.load import load as read_options
from paceline.core.plugins import Command
from paceline.observe.callback import RunInfo
from paceline.observe.loggers import PointLogger
from paceline.observe.report.figure import Figure
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.section import Fact, RecipeReport, Section
from paceline.optim.schedule import Schedule, Span

__all__ = [
    "Command",
    "Fact",
    "Figure",
    "PointLogger",
    "RecipeReport",
    "ReportedRun",
    "RunInfo",
    "Schedule",
    "Section",
    "Span",
    "read_options",
]
