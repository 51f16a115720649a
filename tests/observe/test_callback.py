"""Callbacks: what is one, and the name that they had."""

from __future__ import annotations

import pytest

import paceline
from paceline.observe.callback import Callback, NotAWatcher, checked


def test_what_is_no_callback_is_refused() -> None:
    callback = Callback()
    assert checked([callback]) == [callback]
    with pytest.raises(NotAWatcher, match="function is no watcher"):
        checked([lambda step: None])
    with pytest.raises(NotAWatcher, match="the class Callback is no watcher") as refused:
        checked([Callback])
    assert "paceline.Callback" in refused.value.hint


def test_a_watcher_is_a_callback() -> None:
    class Old(paceline.Watcher):
        pass

    assert paceline.Watcher is paceline.Callback is Callback
    assert checked([Old()])
