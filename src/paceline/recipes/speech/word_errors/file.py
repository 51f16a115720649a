"""File of a run with the error analysis of its last validation. It needs no package of speech: reports read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from paceline.core.disk import replacing
from paceline.core.run_folder import RunFolder

ERRORS = "asr-errors.json"
"""File of the run folder with the error analysis of the last validation, by set."""
NUM_WORST = 10
MOST_SPEAKERS = 200
MOST_CHARACTERS = 300
"""Length to which texts and names are cut."""


class Worst(TypedDict):
    """An utterance with many errors."""

    name: str
    speaker: str | None
    errors: int
    words: int
    reference: str
    hypothesis: str


class Analysis(TypedDict):
    """Errors of a set, or of a rank's part of it; plain values, for JSON."""

    words: int
    substitutions: int
    deletions: int
    insertions: int
    speakers: dict[str, list[int]]
    """Errors and words by speaker, of the `MOST_SPEAKERS` with most words. Empty if the manifest names no speaker."""
    num_speakers: int
    worst: list[Worst]
    """Utterances with most errors."""


def kinds(analysis: Analysis) -> dict[str, int]:
    """Return the four numbers of an analysis, for the journal."""
    names = ("words", "substitutions", "deletions", "insertions")
    return {name: int(analysis[name]) for name in names}  # type: ignore[literal-required]


def write_analyses(folder: Path, analyses: Mapping[str, Analysis]) -> None:
    """Write the file of a run; do nothing if the folder is not a run."""
    if RunFolder(folder).is_run:
        # Ignore ENOSPC here: the journal write that follows reports it.
        with suppress(OSError), replacing(folder / ERRORS) as file:
            json.dump(analyses, file)


def read_analyses(values: Any) -> Iterator[tuple[str, Analysis]]:
    """Yield (set, analysis) from the values of a file; skip entries that are damaged or of another version."""
    for name, analysis in values.items() if isinstance(values, dict) else ():
        try:
            yield str(name), _analysis(analysis)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError, OverflowError):
            continue


def _analysis(values: Any) -> Analysis:
    counts = kinds(values)
    speakers = [(str(who), [int(sums[0]), int(sums[1])]) for who, sums in values["speakers"].items()]
    return {
        "words": counts["words"],
        "substitutions": counts["substitutions"],
        "deletions": counts["deletions"],
        "insertions": counts["insertions"],
        "speakers": dict(speakers[:MOST_SPEAKERS]),
        "num_speakers": int(values["num_speakers"]),
        "worst": [_worst(each) for each in values["worst"][:NUM_WORST]],
    }


def _worst(values: Mapping[str, Any]) -> Worst:
    texts = {name: str(values[name])[:MOST_CHARACTERS] for name in ("name", "reference", "hypothesis")}
    speaker = None if values.get("speaker") is None else str(values["speaker"])[:MOST_CHARACTERS]
    return {
        "name": texts["name"],
        "speaker": speaker,
        "errors": int(values["errors"]),
        "words": int(values["words"]),
        "reference": texts["reference"],
        "hypothesis": texts["hypothesis"],
    }
