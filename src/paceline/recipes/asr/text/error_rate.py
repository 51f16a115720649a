"""Word and character errors of a hypothesis: the fewest substitutions, insertions and deletions from the reference.

Each function gives (errors, length of the reference), to be summed over a corpus before dividing. A reference without
words has weight 0: whatever was heard there is an error and changes the rate only beside other references.
"""

from __future__ import annotations

from rapidfuzz.distance import Levenshtein


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
