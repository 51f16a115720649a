"""Language models in KenLM's binary format, asked through the package `kenlm` (extra `kenlm`)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import NotInstalled
from paceline.recipes.speech.decoding.arpa import NoLanguageModel
from paceline.recipes.speech.decoding.ngram import END, START, UNKNOWN, Tables

MAGIC: Final = b"mmap lm http://kheafield.com/code"
_HEADER: Final = 88
"""Bytes before the fixed part: magic and test values."""
_FIXED: Final = struct.Struct("<BxxxfIBxxxI")
"""Order, size of hash tables, kind of model, 1 if words are stored, version of the search."""


class KenlmModel:
    """A KenLM binary: probabilities come from KenLM, the list of words from the end of the file."""

    tables: Tables | None = None

    def __init__(self, path: Path) -> None:
        try:
            import kenlm
        except ModuleNotFoundError:
            raise NotInstalled(
                f"{path} is a binary of KenLM, and the package kenlm, which reads it, is not installed",
                hint="`pip install 'paceline[kenlm]'`, or give the ARPA file that it was made of",
            ) from None
        known = _stored_words(path)
        try:
            self._model: Any = kenlm.Model(str(path))
        except (OSError, RuntimeError) as error:
            raise NoLanguageModel(path, str(error)) from None
        self.order = int(self._model.order)
        self.words: Sequence[str] = known
        self._new_state = kenlm.State
        ids = {word: number for number, word in enumerate(self.words)}
        self.end, self.unknown = ids[END], ids[UNKNOWN]
        self._states: list[Any] = []
        self._ids: dict[Any, int] = {}
        begin, nothing = kenlm.State(), kenlm.State()
        self._model.BeginSentenceWrite(begin)
        self._model.NullContextWrite(nothing)
        self.start, self.empty = self._id(begin), self._id(nothing)

    def advance(
        self, states: NDArray[np.int64], words: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        log_probs, nexts = np.empty(len(states)), np.empty(len(states), np.int64)
        for place, (state, word) in enumerate(zip(states.tolist(), words.tolist(), strict=True)):
            after = self._new_state()
            log_probs[place] = self._model.BaseScore(self._states[state], self.words[word], after)
            nexts[place] = self._id(after)
        return log_probs, nexts

    def _id(self, state: Any) -> int:
        number = self._ids.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number


def is_kenlm(path: Path) -> bool:
    """Return True if a file is a binary of KenLM."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _stored_words(path: Path) -> list[str]:
    """Return the words of a model, which `build_binary` stores behind its tables, each with a zero behind."""
    try:
        content = path.read_bytes()
        _, _, _, has_words, _ = _FIXED.unpack_from(content, _HEADER)
        (count,) = struct.unpack_from("<Q", content, _HEADER + _FIXED.size)
    except (OSError, struct.error) as error:
        raise NoLanguageModel(path, str(error)) from None
    begin = content.rfind(f"{UNKNOWN}\0".encode())
    words = content[begin:].split(b"\0")[:-1] if begin >= 0 and has_words == 1 else []
    if len(words) != count:
        raise NoLanguageModel(path, "it does not hold its words; give the ARPA file, or build the binary anew")
    known = [word.decode("utf-8", "surrogateescape") for word in words]
    missing = [word for word in (START, END) if word not in known]
    if missing:
        raise NoLanguageModel(path, f"it has no word {missing[0]!r}")
    return known
