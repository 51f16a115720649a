"""Small language models, and the back-off rule as it is written down: with dictionaries, one word at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SENTENCES = [text.split() for text in ("a b a", "b a b b", "ab b a", "a ab ba", "b b", "a b ab", "ba a a b", "a")]

ARPA = """\\data\\
ngram 1=6
ngram 2=5
ngram 3=3

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.5
-0.9\t</s>
-0.6\ta\t-0.3
-0.8\tb\t-0.2
-1.1\tab

\\2-grams:
-0.4\t<s> a\t-0.1
-0.7\ta b\t-0.25
-0.5\tb a
-0.3\tb </s>
-1.0\ta ab\t0.05

\\3-grams:
-0.2\t<s> a b
-0.35\ta b </s>
-0.15\tb ab a

\\end\\
"""
"""A pruned model: "b ab", with which one of its 3-grams begins, is not there."""


def grams_of(text: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """Return log-probability and back-off weight of each n-gram of an ARPA file."""
    grams = {}
    order = 0
    for line in text.splitlines():
        if line.endswith("-grams:"):
            order = int(line[1])
        elif order and line and not line.startswith("\\"):
            fields = line.split()
            grams[tuple(fields[1 : order + 1])] = (float(fields[0]), float((fields[order + 1 :] or ["0"])[0]))
    return grams


def log_prob(grams: dict[tuple[str, ...], tuple[float, float]], history: Sequence[str], word: str, order: int) -> float:
    """The back-off rule: the longest n-gram that is there, and the weights of the longer contexts."""
    known = [each if (each,) in grams else "<unk>" for each in (*history, word)]
    context, last = tuple(known[:-1])[-(order - 1) :] if order > 1 else (), known[-1]
    total = 0.0
    while True:
        if (*context, last) in grams:
            return total + grams[(*context, last)][0]
        total += grams.get(context, (0.0, 0.0))[1]
        context = context[1:]


def written(folder: Path, text: str = ARPA) -> Path:
    path = folder / "lm.arpa"
    path.write_text(text)
    return path


def outputs(dice: np.random.Generator, number: int, classes: int, sharpness: float) -> list[NDArray[np.float32]]:
    """Return log-probabilities of utterances of several lengths."""
    found = []
    for _ in range(number):
        logits = sharpness * dice.standard_normal((int(dice.integers(1, 25)), classes))
        found.append((logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float32))
    return found
