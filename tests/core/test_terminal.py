"""Text that a terminal would obey is shown instead."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import PacelineError
from paceline.core.terminal import emit, one_line, visible


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert all(letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Zl", "Zp") for letter in visible(text))
    assert not set(one_line(text)) & set("\n\t\r")


@given(st.text(st.characters(exclude_categories=["Cc", "Zl", "Zp", "Cs", "Cf"])))
def test_all_other_text_stays(text: str) -> None:
    assert visible(text) == one_line(text) == text


def test_what_is_shown() -> None:
    assert visible("a\x1b[31mb\rc\x9b\u202ed\te\n") == "a\\x1b[31mb\\rc\\x9b\\u202ed\te\n"
    assert visible("\udc9b\udcff") == "\\x9b\udcff"
    assert visible("\u3000 中文 नमस्ते \u200d") == "\u3000 中文 नमस्ते \u200d"
    assert one_line("a\nb") == "a\\nb"
    assert str(PacelineError("\x1b]0;title\x07")) == "\\x1b]0;title\\x07"


def test_data_is_changed_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, shown in ((io.StringIO(), "\x1b[1m"), (Terminal(), "\\x1b[1m")):
        monkeypatch.setattr(sys, "stdout", place)
        emit("\x1b[1m")
        assert place.getvalue() == shown
