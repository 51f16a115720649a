"""The library of the search: kept where nobody else writes, made anew where it is broken; errors come out of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.recipes.speech.decoding import native
from paceline.recipes.speech.decoding.arpa import read_arpa
from paceline.recipes.speech.decoding.decoder import BeamDecoder
from paceline.recipes.speech.text.pieces import Pieces
from tests.recipes.speech.decoding import models


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of libraries in a new cache; that of other tests is loaded again behind it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path / "paceline" / "native"
    native.library.cache_clear()


def loaded() -> Path:
    native.library.cache_clear()
    return Path(native.library()._name)


def test_a_library_is_kept_and_made_anew_where_it_is_broken_or_not_ours(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = loaded()
    assert list(folder.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o700
    made = path.stat().st_ino
    assert loaded().stat().st_ino == made
    good = path.read_bytes()
    for name, content, mode in (("broken", b"cut", 0o700), ("open", good, 0o777)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))  # a path that is loaded is not looked at again
        there = tmp_path / name / "paceline" / "native" / path.name
        there.parent.mkdir(parents=True, mode=0o700)
        there.write_bytes(content)
        there.chmod(mode)
        assert loaded() == there
        assert there.read_bytes()[:4] == b"\x7fELF"
        assert there.stat().st_mode & 0o777 == 0o700
        assert list(there.parent.iterdir()) == [there]


def test_a_folder_that_others_may_write_is_not_used(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert loaded().parent != folder
    assert f"cannot be kept in {folder}: others may write it" in capfd.readouterr().err
    assert list(folder.iterdir()) == []


class Asked:
    """A model without tables, as KenLM's, that fails at a question."""

    tables = None

    def __init__(self, path: Path, failure: BaseException | None) -> None:
        self._model, self.failure, self.left = read_arpa(path), failure, 3

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def advance(
        self, states: NDArray[np.int64], words: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        self.left -= 1
        if self.failure is not None and not self.left:
            raise self.failure
        return self._model.advance(states, words)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("no such state")])
def test_what_a_language_model_raises_ends_the_search(tmp_path: Path, failure: BaseException) -> None:
    model = Asked(models.written(tmp_path), failure)
    search = BeamDecoder(Pieces((" ", "a", "b")), lm=model)  # type: ignore[arg-type]
    assert isinstance(search.on_cpu, native.NativeSearch)
    rows = torch.from_numpy(np.stack([models.outputs(np.random.default_rng(7), 1, 4, 1.0)[0]]))
    with pytest.raises(type(failure)) as caught:
        search.texts(rows, [rows.shape[1]])
    assert caught.value is failure
    model.failure = None  # and the next search knows nothing of it
    expected = BeamDecoder(search.labels, lm=models.written(tmp_path)).texts(rows, [rows.shape[1]])
    assert search.texts(rows, [rows.shape[1]]) == expected
