"""The recipes by name, as data: nothing is imported before one is used."""

from __future__ import annotations

from paceline.core import plugins

RECIPES = {
    "asr": "paceline.recipes.asr.task:Asr",
    "continual": "paceline.recipes.continual.task:Continual",
    "digits": "paceline.recipes.digits:Digits",
    "translation": "paceline.recipes.translation.task:Translation",
}
REPORTS = (
    "paceline.recipes.asr.report:AsrReport",
    "paceline.recipes.continual.report:ContinualReport",
    "paceline.recipes.translation.report:TranslationReport",
    "paceline.train.predict.report:PredictReport",
)
"""Sections that recipes and `paceline predict` add to `paceline report`; these modules do not import torch."""


def recipe_names() -> list[str]:
    """Return the names of all recipes: ours, and those of plugins."""
    return list(dict.fromkeys([*RECIPES, *plugins.names("recipes")]))
