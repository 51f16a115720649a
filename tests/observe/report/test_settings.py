"""Settings in which runs differ."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.report.settings import differences, settings_of
from tests.observe.report.made import made


def test_only_settings_that_differ_are_compared(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path, name="a", nested={"x": 1, "y": [1, 2]}), made(tmp_path, name="b", lr=0.2, out="other")
    assert differences([settings_of(ours), settings_of(theirs)]) == {
        "lr": ["0.1", "0.2"],
        "nested.x": ["1", "(none)"],
        "nested.y": ["1 2", "(none)"],
    }
