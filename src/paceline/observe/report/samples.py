"""Samples that a run showed when it was validated: what it should have said, what it said, and how that came about."""

from __future__ import annotations

import difflib
import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from paceline.observe.report.runs import RunRecord

T = TypeVar("T")
MOST_BEFORE = 12
REFERENCE, HYPOTHESIS = "reference", "hypothesis"


@dataclass(frozen=True)
class Sample:
    """One sample of a validation set: as it was last, and what it was before, by step."""

    last: Mapping[str, str]
    before: list[tuple[int, Mapping[str, str]]]


def samples_of(run: RunRecord) -> dict[str, list[Sample]]:
    """By validation set. The same samples are shown every time, in the same order."""
    seen = [(int(record["step"]), record["samples"]) for record in run.validations if record.get("samples")]
    if not seen:
        return {}
    found: dict[str, list[Sample]] = {}
    for name, last in seen[-1][1].items():
        found[name] = []
        for place, sample in enumerate(last):
            before = [(step, of[name][place]) for step, of in seen[:-1] if len(of.get(name, [])) > place]
            found[name].append(Sample(sample, _spread(before)))
    return found


def _spread(before: list[T], most: int = MOST_BEFORE) -> list[T]:
    """So many at most, from the first to the last."""
    if len(before) <= most:
        return before
    return [before[round(place * (len(before) - 1) / (most - 1))] for place in range(most)]


def marked(sample: Mapping[str, str]) -> dict[str, str]:
    """The texts of a sample as HTML; words in which hypothesis and reference differ are marked."""
    texts = {name: html.escape(str(text)) for name, text in sample.items()}
    if REFERENCE in sample and HYPOTHESIS in sample:
        said, heard = str(sample[REFERENCE]).split(), str(sample[HYPOTHESIS]).split()
        pairs = difflib.SequenceMatcher(None, said, heard, autojunk=False).get_opcodes()
        texts[REFERENCE] = " ".join(_words(said[a:b], kind != "equal") for kind, a, b, _, _ in pairs if b > a)
        texts[HYPOTHESIS] = " ".join(_words(heard[c:d], kind != "equal") for kind, _, _, c, d in pairs if d > c)
    return texts


def _words(words: list[str], is_wrong: bool) -> str:
    text = html.escape(" ".join(words))
    return f"<mark>{text}</mark>" if is_wrong else text
