"""The recipes by name, as data: nothing is imported before one is used."""

from __future__ import annotations

from pathlib import Path

from paceline.core import plugins
from paceline.core.run_folder import RECORD

RECIPES = {
    "asr": "paceline.recipes.asr.task:Asr",
    "continual": "paceline.recipes.continual.task:Continual",
    "digits": "paceline.recipes.digits:Digits",
    "translation": "paceline.recipes.translation.task:Translation",
}
MODELS = {"asr": (".nemo", ("network.yaml", "model.safetensors"))}
"""Models that a recipe uses without a run: the ending of a file, or the files in a folder."""
REPORTS = (
    "paceline.recipes.asr.report:AsrReport",
    "paceline.recipes.continual.report:ContinualReport",
    "paceline.recipes.translation.report:TranslationReport",
    "paceline.train.predict.report:PredictReport",
)
"""Sections that recipes and `paceline predict` add to `paceline report`; these modules do not import torch."""


def recipe_of_model(path: Path) -> str | None:
    """Return the recipe that uses a file or folder as a model; None if none does, or if it is a run.

    A path that does not exist is judged by its ending.
    """
    for name, (ending, files) in MODELS.items():
        if path.suffix == ending and not path.is_dir():
            return name
        if not (path / RECORD).exists() and all((path / file).is_file() for file in files):
            return name
    return None


def recipe_names() -> list[str]:
    """Return the names of all recipes: ours, and those of plugins."""
    return list(dict.fromkeys([*RECIPES, *plugins.names("recipes")]))
