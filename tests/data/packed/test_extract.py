"""Extraction: file names like tags, never twice, never outside of the folder; a manifest that is whole or missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.data.packed.extract import MANIFEST, extract, file_names, is_free
from paceline.data.packed.reader import open_packed
from tests.data.packing import opened


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


def test_killed_while_the_manifest_is_written(tmp_path: Path) -> None:
    """Nothing is lost by writing there again, and what the killed one left is removed."""
    folder = tmp_path / "x"
    extract(opened(tmp_path / "a.h5"), folder, range(3))
    (folder / MANIFEST).rename(folder / f".{MANIFEST}.17.writing")
    assert is_free(folder)
    result = extract(open_packed(tmp_path / "a.h5"), folder, range(2))
    assert (result.num_rows, result.num_others) == (2, 0)
    assert not any(path.name.endswith(".writing") for path in folder.iterdir())
    assert not is_free(folder)
