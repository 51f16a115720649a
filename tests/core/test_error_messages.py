"""Messages and hints of all our exceptions, word for word as in golden/errors.json (see sample_errors.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline import PacelineError
from tests.core.sample_errors import load_all, said

GOLDEN: dict[str, list[list[dict[str, Any]]]] = json.loads(
    (Path(__file__).parent / "golden" / "errors.json").read_text(encoding="utf-8")
)
"""Class -> the samples of each class of that name."""

RENAMED: dict[str, str] = {
    "TaskFileFails": "UserFileFails",
}
"""Name in the golden file -> name today."""

MERGED = {
    "CannotWrite": "one for two classes, and with an advice: test_disk.py",
    "DiskFull": "its hint names the free space: test_disk.py",
    "DiskFilled": "a DiskFull with an advice",
    "OwnFileFails": "a UserFileFails, which shows the traceback from the user's file on",
    "NotASet": "its other hint is that of SetsWithoutNames: train/test_validate.py",
    "NoRoom": "a CannotWrite with an advice: test_run_folder.py",
}
"""Classes of the golden file that have no constructor of their own any more."""

UNSAMPLED = {
    *(
        "BadManifest",
        "BadText",
        "CallInvalid",
        "CutUnknown",
        "DefaultFails",
        "DuplicateRank",
        "FirstRankUnreached",
        "GatheredShapes",
        "LabelsLackLetters",
        "LauncherGone",
    ),
    *("LauncherUnreached", "NetworkInvalid", "NodesMissing", "NotAnAnswer", "NothingKept"),
    *(
        "NodeRefused",
        "NothingNamed",
        "RanksMissing",
        "RowDamaged",
        "SettingsInvalid",
        "SettingsOutdated",
        "StreamsDiffer",
        "TranscriptsTooLong",
    ),
}
"""Classes that take objects of ours; tests of what raises them read their messages."""


@pytest.fixture(scope="module")
def errors() -> dict[str, list[type[PacelineError]]]:
    """All exceptions of today, by name."""
    by_name: dict[str, list[type[PacelineError]]] = {}
    for error in load_all():
        by_name.setdefault(error.__name__, []).append(error)
    return by_name


def test_unsampled_classes_are_named() -> None:
    assert {name for name, classes in GOLDEN.items() if not all(classes)} == UNSAMPLED


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - set(MERGED) - UNSAMPLED))
def test_messages_stay(name: str, errors: dict[str, list[type[PacelineError]]]) -> None:
    candidates = errors.get(RENAMED.get(name, name), [])
    assert candidates, f"{name} is gone: add it to RENAMED or MERGED"
    for samples in GOLDEN[name]:
        wanted = [_plain({"message": sample["message"], "hint": sample["hint"]}) for sample in samples]
        answers = [_answers(error, samples) for error in candidates]
        assert wanted in answers, f"expected {wanted}\nbut {candidates[0].__module__}.{name} has {answers[0]}"


def _answers(error: type[PacelineError], samples: list[dict[str, Any]]) -> list[Any]:
    answers: list[Any] = []
    for sample in samples:
        try:
            answers.append(_plain(said(error, sample)))
        except Exception as failure:
            answers.append(repr(failure))
    return answers


def _plain(texts: dict[str, str]) -> dict[str, str]:
    """Modules may move: only the last part of their names counts."""
    return {name: re.sub(r"paceline(\.\w+)*\.(\w+)", r"paceline.\2", text) for name, text in texts.items()}
