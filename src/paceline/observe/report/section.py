"""Section of the page, and the interface by which a recipe adds its own words, facts and sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core import plugins
from paceline.observe.report.figure import Figure

if TYPE_CHECKING:
    from paceline.observe.report.runs import ReportedRun


@dataclass(frozen=True)
class Fact:
    """A number of the summary, with its name and a note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page: words, then plots."""

    name: str
    title: str
    text: str = ""
    """HTML."""
    figures: Sequence[Figure] = ()

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.figures


class RecipeReport:
    """Part of a recipe in reports. Subclass it and override what the recipe has.

    It is asked about every run, whatever task made it, and adds nothing to those without files or metrics of its own.
    """

    goals: tuple[str, ...] = ()
    """Metrics that tell how good a run is, where the setting `monitor` names none; the loss comes after them."""
    percent: tuple[str, ...] = ()
    """Metrics that are shown in percent."""

    def facts(self, run: ReportedRun) -> Sequence[Fact]:
        """Return numbers for the summary of a run."""
        return ()

    def sections(self, runs: Sequence[ReportedRun]) -> Sequence[Section]:
        """Return sections about runs; empty ones are left out."""
        return ()


def recipe_reports() -> list[RecipeReport]:
    """Return the report sections that plugins register."""
    return [
        plugins.guarded(plugin, "cannot be made", plugins.load(plugin)) for plugin in plugins.installed().of("reports")
    ]
