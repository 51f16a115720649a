"""The recipes by name, as data: nothing is imported before one is used."""

from __future__ import annotations

RECIPES = {
    "digits": "paceline.recipes.digits:Digits",
    "continual": "paceline.recipes.continual.task:Continual",
}
