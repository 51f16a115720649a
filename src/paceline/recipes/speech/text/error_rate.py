"""Word and character errors of a hypothesis: the fewest substitutions, insertions and deletions from the reference.

Each function gives (errors, length of the reference), to be summed over a corpus before dividing. A reference without
words has weight 0: whatever was heard there is an error and changes the rate only beside other references.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein


class WordEdits(NamedTuple):
    """Fewest edits from a reference to a hypothesis, by kind."""

    substitutions: int
    deletions: int
    """Words of the reference that were not heard."""
    insertions: int
    """Words that were heard and not said."""
    words: int
    """Of the reference."""

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions


def word_edits(reference: str, hypothesis: str) -> WordEdits:
    """Count word errors by kind; words are separated by white space. Their sum is that of `word_errors`."""
    expected, heard = reference.split(), hypothesis.split()
    if expected == heard:
        return WordEdits(0, 0, 0, len(expected))
    kinds = Counter(edit.tag for edit in Levenshtein.editops(*_numbered(expected, heard)))
    return WordEdits(kinds["replace"], kinds["delete"], kinds["insert"], len(expected))


def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Count word errors; words are separated by white space."""
    expected, heard = reference.split(), hypothesis.split()
    return Levenshtein.distance(*_numbered(expected, heard)), len(expected)


def character_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Count character errors; spaces between words are characters, those around the text are not."""
    expected, heard = reference.strip(), hypothesis.strip()
    return Levenshtein.distance(expected, heard), len(expected)


def _numbered(left: list[str], right: list[str]) -> tuple[list[int], list[int]]:
    """One number per distinct word: compared by hash, two words could pass for one."""
    numbers: dict[str, int] = {}
    return (
        [numbers.setdefault(word, len(numbers)) for word in left],
        [numbers.setdefault(word, len(numbers)) for word in right],
    )
