"""Translation in reports: BLEU is the goal."""

from __future__ import annotations

from paceline.observe.report.section import RecipeReport


class TranslationReport(RecipeReport):
    """BLEU, then chrF; both are percent already."""

    goals = ("bleu", "chrf")
