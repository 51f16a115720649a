"""Samples: wrong words are marked, earlier hypotheses are shown."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.report import texts
from paceline.observe.report.samples import marked
from tests.observe.report.made import made


def test_wrong_words_are_marked_and_text_is_never_markup() -> None:
    found = marked({"reference": "see a cat", "hypothesis": "see <b> cat"})
    assert found == {"reference": "see <mark>a</mark> cat", "hypothesis": "see <mark>&lt;b&gt;</mark> cat"}
    assert marked({"label": "<i>", "guess": "x"}) == {"label": "&lt;i&gt;", "guess": "x"}


def test_samples_show_what_was_heard_before(tmp_path: Path) -> None:
    shown = texts.samples([made(tmp_path)])
    assert "see a cat <mark>now</mark>" in shown
    assert "step 2</span> see a <mark>bat</mark>" in shown
