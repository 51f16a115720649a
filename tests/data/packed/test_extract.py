"""Names of extracted files: similar to their tags, never twice, never outside of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.data.packed.extract import file_names


@given(st.lists(st.sampled_from(["a.wav", "a-1", "a-2.wav", "a-3.wav", "a-3-3.wav", "b/a", "a.wav#1", "", ".."])))
@example(["a.wav", "a-3.wav", "a.wav"])
def test_names_are_given_once(tags: list[str]) -> None:
    assert len(set(file_names(tags, ".wav"))) == len(tags)


def test_names_stay_in_the_folder() -> None:
    tags: list[Any] = ["a/b.flac", "/etc/passwd", "../../x", "a/b.wav", "", "a/b.flac#1.5", "manifest.json", "..", "é"]
    names = file_names(tags, ".wav")
    assert len(set(names)) == len(tags)
    assert all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in names)
    assert names[:2] == ["a/b.wav", "etc/passwd.wav"]
