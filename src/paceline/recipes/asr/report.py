"""Speech recognition in reports: word and character error rates."""

from __future__ import annotations

from paceline.observe.report.section import RecipeReport


class AsrReport(RecipeReport):
    """The word error rate is the goal; error rates are shown in percent."""

    goals = ("wer",)
    percent = ("wer", "cer")
