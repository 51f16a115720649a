"""What tests of `-O4` share: a cache of their own, a CPU that can do a certain lot, prescribed times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.choice import CannotRun
from paceline.train.autotune import timing
from tests.train.small import CPU


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "capabilities", lambda device: CPU)  # no compiler: it would take a minute


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Prescribed seconds by way; a way without one cannot run. What was measured is under "asked"."""
    seconds: dict[str, Any] = {"asked": []}

    def measure(way: Candidate, limit_s: float, **rest: Any) -> float:
        seconds["asked"].append(way.name)
        if way.name not in seconds:
            raise CannotRun("not prescribed")
        return seconds[way.name]

    monkeypatch.setattr(timing, "step_seconds", measure)
    monkeypatch.setattr(timing, "in_turns", lambda ways, workload: {way: seconds[way.name] for way in ways})
    return seconds
