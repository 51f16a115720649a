"""The recipes by name, as data: nothing is imported before one is used."""

from __future__ import annotations

RECIPES = {
    "asr": "paceline.recipes.asr.task:Asr",
    "continual": "paceline.recipes.continual.task:Continual",
    "digits": "paceline.recipes.digits:Digits",
}
REPORTS = ("paceline.recipes.asr.report:AsrReport", "paceline.recipes.continual.report:ContinualReport")
"""Sections that recipes add to `paceline report`; these modules do not import torch."""
