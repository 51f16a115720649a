"""Words of a language model's text: those that the search forms with the labels of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.recipes.speech.decoding import text


@pytest.mark.parametrize(
    ("pieces", "letters", "words"),
    [
        (("\u4f60", "\u597d"), "\u4f60\u597d", ["\u4f60", "\u597d", "\u4f60"]),
        ((" ", "\u4f60", "\u597d"), " \u4f60\u597d", ["\u4f60\u597d", "\u4f60"]),
        (("<unk>", "<0xE4>", "\u2581\u4f60", "\u597d"), " \u4f60\u597d", ["\u4f60\u597d", "\u4f60"]),
    ],
    ids=["no space", "space", "subwords and bytes"],
)
def test_words_are_parted_as_the_labels_of_a_run_part_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: tuple[str, ...], letters: str, words: list[str]
) -> None:
    record = SimpleNamespace(settings={"network": {}, "text_rules": "none"}, task="asr")
    monkeypatch.setattr(text, "read_run", lambda run: record)
    monkeypatch.setattr(text, "stored", lambda run: SimpleNamespace(pieces=pieces))
    how = text.spelling(tmp_path, None, None)
    assert "".join(how.letters.symbols) == letters
    (tmp_path / "text.txt").write_text("\u4f60\u597d \u4f60\n", encoding="utf-8")
    assert text.sentences([str(tmp_path / "text.txt")], how) == [words]
