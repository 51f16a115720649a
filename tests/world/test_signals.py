"""Why ranks stop: asked to, or because the launcher of one of them is gone."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.world import signals
from paceline.world.link import Link


class Ranks:
    """A link to ranks whose places are known."""

    def __init__(self, *others: str | None) -> None:
        self._others = others

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self._others]


def test_a_launcher_that_is_gone_is_not_taken_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signals.stop_reason(cast(Link, Ranks(None))) == "asked to stop"
    assert signals.stop_reason(cast(Link, Ranks("n1", "n1", None))) == "the launcher on n1 is gone"
    monkeypatch.setattr(signals, "is_orphan", lambda: True)
    monkeypatch.setattr(signals.socket, "gethostname", lambda: "n0")
    assert signals.stop_reason(cast(Link, Ranks(None, "n1"))) == "the launcher on n0, n1 is gone"
