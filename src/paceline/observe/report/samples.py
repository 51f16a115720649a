"""Samples of validation sets: reference, hypothesis, and the hypotheses of earlier validations."""

from __future__ import annotations

import difflib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.observe.report.runs import ReportedRun

T = TypeVar("T")
MOST_BEFORE = 12
REFERENCE, HYPOTHESIS = "reference", "hypothesis"


@dataclass(frozen=True)
class Sample:
    """One sample of a validation set: its texts at the last validation, and at earlier ones by step."""

    last: Mapping[str, str]
    before: Sequence[tuple[int, Mapping[str, str]]]


def samples_of(run: ReportedRun) -> dict[str, list[Sample]]:
    """Return samples by validation set. The same samples are shown every time, in the same order."""
    shown = [(record.step, record.samples) for record in run.validations if record.samples]
    if not shown:
        return {}
    by_set: dict[str, list[Sample]] = {}
    for name, last in shown[-1][1].items():
        by_set[name] = []
        for place, sample in enumerate(last):
            before = [(step, of[name][place]) for step, of in shown[:-1] if len(of.get(name, [])) > place]
            by_set[name].append(Sample(sample, _spread(before)))
    return by_set


def _spread(before: Sequence[T], most: int = MOST_BEFORE) -> Sequence[T]:
    """Return `most` of them at most, evenly spread from the first to the last."""
    if len(before) <= most:
        return before
    return [before[round(place * (len(before) - 1) / (most - 1))] for place in range(most)]


def marked(sample: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a sample as HTML; words in which hypothesis and reference differ are marked."""
    texts = {name: html.escape(str(text)) for name, text in sample.items()}
    if REFERENCE in sample and HYPOTHESIS in sample:
        expected, actual = str(sample[REFERENCE]).split(), str(sample[HYPOTHESIS]).split()
        pairs = difflib.SequenceMatcher(None, expected, actual, autojunk=False).get_opcodes()
        texts[REFERENCE] = " ".join(_words(expected[a:b], kind != "equal") for kind, a, b, _, _ in pairs if b > a)
        texts[HYPOTHESIS] = " ".join(_words(actual[c:d], kind != "equal") for kind, _, _, c, d in pairs if d > c)
    return texts


def _words(words: list[str], is_wrong: bool) -> str:
    text = html.escape(" ".join(words))
    return f"<mark>{text}</mark>" if is_wrong else text
