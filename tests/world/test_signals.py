"""Why ranks stop: asked to, or because the launcher of one of them is gone."""

from __future__ import annotations

import signal
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


@pytest.mark.parametrize("was_asked", [True, False])
def test_who_was_asked_to_stop_and_leaves_is_deaf(was_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next Ctrl-C would print a traceback out of the interpreter's end."""
    monkeypatch.setattr(signals, "_process_ends", True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.handled([signal.SIGINT], lambda number, frame: None, lambda: was_asked):
            pass
        assert signal.getsignal(signal.SIGINT) is (signal.SIG_IGN if was_asked else signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)
