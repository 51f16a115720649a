"""Error analysis of a validation set: which kinds of word errors, on which utterances, of which speakers.

`ErrorBook` collects the errors of a rank; `joined` merges the analyses of all ranks, in a bounded size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paceline.recipes.speech.text.error_rate import WordEdits, word_edits
from paceline.recipes.speech.word_errors.file import MOST_CHARACTERS, MOST_SPEAKERS, NUM_WORST, Analysis


class _Heard(NamedTuple):
    sample: int
    edits: WordEdits
    reference: str
    hypothesis: str


class ErrorBook:
    """Word errors of the utterances that this rank has validated since the last `take`."""

    def __init__(self) -> None:
        self._heard: list[_Heard] = []

    def note(self, sample: int, reference: str, hypothesis: str) -> WordEdits:
        edits = word_edits(reference, hypothesis)
        self._heard.append(_Heard(sample, edits, reference[:MOST_CHARACTERS], hypothesis[:MOST_CHARACTERS]))
        return edits

    def rows(self) -> list[tuple[int, tuple[int, int]]]:
        """Return (sample, (errors, words)) of each utterance."""
        return [(each.sample, (each.edits.errors, each.edits.words)) for each in self._heard]

    def take(self, name_of: Callable[[int], str], speakers: Mapping[int, str]) -> Analysis:
        """Return the analysis of the utterances, with names and speakers of their samples, and clear the book."""
        heard, self._heard = self._heard, []
        by_speaker: dict[str, list[int]] = {}
        for each in heard:
            speaker = speakers.get(each.sample)
            if speaker is not None:
                sums = by_speaker.setdefault(speaker[:MOST_CHARACTERS], [0, 0])
                sums[0] += each.edits.errors
                sums[1] += each.edits.words
        worst = heapq.nsmallest(NUM_WORST, (each for each in heard if each.edits.errors), key=_by_errors)
        return {
            "words": sum(each.edits.words for each in heard),
            "substitutions": sum(each.edits.substitutions for each in heard),
            "deletions": sum(each.edits.deletions for each in heard),
            "insertions": sum(each.edits.insertions for each in heard),
            "speakers": by_speaker,
            "num_speakers": len(by_speaker),
            "worst": [
                {
                    "name": name_of(each.sample)[-MOST_CHARACTERS:],
                    "speaker": speakers.get(each.sample),
                    "errors": each.edits.errors,
                    "words": each.edits.words,
                    "reference": each.reference,
                    "hypothesis": each.hypothesis,
                }
                for each in worst
            ],
        }


def _by_errors(heard: _Heard) -> tuple[int, int]:
    return -heard.edits.errors, heard.sample


def joined(parts: Sequence[Analysis]) -> Analysis:
    """Return the analysis of a set from the analyses of all ranks; it is the same on any number of ranks."""
    speakers: dict[str, list[int]] = {}
    for part in parts:
        for name, (errors, words) in part["speakers"].items():
            sums = speakers.setdefault(name, [0, 0])
            sums[0] += errors
            sums[1] += words
    most_words = sorted(speakers.items(), key=lambda item: (-item[1][1], item[0]))[:MOST_SPEAKERS]
    every = [worst for part in parts for worst in part["worst"]]
    return {
        "words": sum(part["words"] for part in parts),
        "substitutions": sum(part["substitutions"] for part in parts),
        "deletions": sum(part["deletions"] for part in parts),
        "insertions": sum(part["insertions"] for part in parts),
        "speakers": dict(most_words),
        "num_speakers": len(speakers),
        "worst": sorted(every, key=lambda worst: (-worst["errors"], worst["name"]))[:NUM_WORST],
    }
