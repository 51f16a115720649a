"""The recipes by name, as data: nothing is imported before one is used."""

from __future__ import annotations

RECIPES = {"asr": "paceline.recipes.asr.task:Asr", "digits": "paceline.recipes.digits:Digits"}
