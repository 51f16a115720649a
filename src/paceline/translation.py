"""Translation from Python: `paceline.translation.load("runs/a").translate(["A dog."])`, and the networks."""

from __future__ import annotations

from paceline.recipes.translation.network.lstm import Lstm
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.network.transformer import Transformer
from paceline.recipes.translation.task import Translation
from paceline.recipes.translation.text.vocabulary import Vocabulary
from paceline.recipes.translation.translator import Translator, load

__all__ = ["Lstm", "Shape", "Transformer", "Translation", "Translator", "Vocabulary", "load"]
