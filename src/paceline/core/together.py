"""Declarations of what cannot go together: the one place of each refusal and of its reason.

A section of settings lists its `exclusions`, and checks itself by them; an error that is raised for such a pair later,
by what a run turns out to be, names it as `excludes`. docs/together.md is made of all of them, and
tests/promises/test_together.py holds pairs of features against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["mathematics", "hardware", "one thing twice", "not written"]


@dataclass(frozen=True)
class Exclusion:
    """Two things that a run cannot have together."""

    first: str
    """As the user types it, or in words."""
    second: str
    kind: Kind
    reason: str
    """Why it cannot be, in a sentence for the table."""


@dataclass(frozen=True)
class SettingsExclusion(Exclusion):
    """Two settings that a run cannot have together."""

    problem: str
    """The line that is shown: names in backticks, `{s.name}` for the value of a setting."""
    applies: Callable[[Any], bool]
    """Return True of settings that have both."""

    def describe(self, settings: Any) -> str:
        """Return the line for these settings."""
        return self.problem.format(s=settings)
