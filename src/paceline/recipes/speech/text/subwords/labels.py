"""Subwords as labels: texts to numbers and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.speech.text.labels import Labels
from paceline.recipes.speech.text.pieces import Pieces
from paceline.recipes.speech.text.subwords.tokenizer import Tokenizer


@dataclass(frozen=True)
class Subwords(Pieces):
    """Subwords that a model writes, in the order of its outputs; the blank of CTC comes after the last, as in NeMo."""

    tokenizer: Tokenizer = field(kw_only=True, repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Subwords:
        return cls(tokenizer.pieces, tokenizer=tokenizer)

    @cached_property
    def letters(self) -> Labels:
        """Characters that they can write, to which texts are brought before they are cut."""
        return Labels(tuple(sorted(self.tokenizer.characters)))

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text; characters that are not known become the unknown label."""
        return self.tokenizer.encode(text)

    def encode_many(self, texts: list[str]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the numbers of all texts in one array, and how many each has."""
        rows = [self.tokenizer.encode(text) for text in texts]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.array([number for row in rows for number in row], np.int16), lengths
