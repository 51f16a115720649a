"""Callbacks: what is one, and the name that they had."""

from __future__ import annotations

import pytest

import paceline
from paceline.core.errors import WrongType
from paceline.observe.callback import Callback, checked


def test_what_is_no_callback_is_refused() -> None:
    callback = Callback()
    assert checked([callback]) == [callback]
    with pytest.raises(WrongType, match="an object of function is not a `paceline.Callback`"):
        checked([lambda step: None])
    with pytest.raises(WrongType, match="the class Callback is not a `paceline.Callback`") as refused:
        checked([Callback])
    assert "paceline.Callback" in refused.value.hint


def test_a_watcher_is_a_callback() -> None:
    class Old(paceline.Watcher):
        pass

    assert paceline.Watcher is paceline.Callback is Callback
    assert checked([Old()])
