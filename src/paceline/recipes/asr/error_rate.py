"""Word and character errors of a hypothesis: the fewest substitutions, insertions and deletions from the reference.

Each function gives (errors, length of the reference), to be summed over a corpus before dividing. A reference without
words has weight 0: whatever was heard there is an error and changes the rate only beside other references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rapidfuzz.distance import Levenshtein
from rich.markup import escape

Operation = Literal["equal", "substitute", "insert", "delete"]


class Aligned(NamedTuple):
    """A word of the reference beside one of the hypothesis; the side that has none is empty."""

    operation: Operation
    reference: str
    hypothesis: str


def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Words are what white space parts."""
    expected, heard = reference.split(), hypothesis.split()
    return Levenshtein.distance(*_numbered(expected, heard)), len(expected)


def character_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Spaces between words are characters too; those around the text are not."""
    expected, heard = reference.strip(), hypothesis.strip()
    return Levenshtein.distance(expected, heard), len(expected)


def alignment(reference: str, hypothesis: str) -> list[Aligned]:
    """The words of both texts side by side, with as few differences as `word_errors` counts."""
    expected, heard = reference.split(), hypothesis.split()
    rows: list[Aligned] = []
    for run in Levenshtein.opcodes(*_numbered(expected, heard)):
        left, right = expected[run.src_start : run.src_end], heard[run.dest_start : run.dest_end]
        if run.tag == "delete":
            rows += [Aligned("delete", word, "") for word in left]
        elif run.tag == "insert":
            rows += [Aligned("insert", "", word) for word in right]
        else:
            operation: Operation = "equal" if run.tag == "equal" else "substitute"
            rows += [Aligned(operation, *pair) for pair in zip(left, right, strict=True)]
    return rows


def marked(rows: Sequence[Aligned]) -> str:
    """The hypothesis in rich's markup: wrong words red, with the right one in brackets; missing ones crossed out."""
    words: list[str] = []
    for operation, reference, hypothesis in rows:
        wrong, right = escape(hypothesis), escape(reference)
        if operation == "equal":
            words.append(right)
        elif operation == "substitute":
            words.append(f"[red]{wrong}[/red] [green]({right})[/green]")
        elif operation == "insert":
            words.append(f"[red]{wrong}[/red]")
        else:
            words.append(f"[strike]{right}[/strike]")
    return " ".join(words)


def _numbered(left: list[str], right: list[str]) -> tuple[list[int], list[int]]:
    """One number per distinct word: compared by hash, two words could pass for one."""
    numbers: dict[str, int] = {}
    return (
        [numbers.setdefault(word, len(numbers)) for word in left],
        [numbers.setdefault(word, len(numbers)) for word in right],
    )
