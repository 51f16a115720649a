"""The search in C: compiled when it is first used, kept in the user's cache, run by one thread per core.

A C compiler is all it needs (Triton needs one for its launchers as well). Where there is none, `search.py` does the same
in tensors: same words, same scores, several times slower on a CPU; `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipes.asr.decoding.limits import FLOOR, Found, Limits, Weights
from paceline.recipes.asr.decoding.ngram import LanguageModel
from paceline.recipes.asr.decoding.words import Alphabet, WordTable

SOURCE: Final = Path(__file__).with_name("search.c")
FLAGS: Final = ("-O3", "-std=c99", "-shared", "-fPIC", "-ffp-contract=off")
COMPILER_VARIABLE: Final = "CC"
_ADVANCE: Final = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))


class CannotCompile(Exception):
    """No library, and why; the caller says what that means."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the compiled search; raise `CannotCompile` where that is not possible."""
    compiler = _compiler()
    if compiler is None:
        raise CannotCompile("no C compiler is installed (cc, gcc or clang)")
    source = SOURCE.read_bytes()
    what = "\n".join([*compiler, *FLAGS, platform.machine(), platform.libc_ver()[1]]).encode()
    name = f"search-{hashlib.sha256(source + what).hexdigest()[:24]}.so"
    path = _folder() / name
    if not path.exists():
        _compile(compiler, path)
    try:
        return _declared(ctypes.CDLL(str(path)))
    except OSError as error:
        raise CannotCompile(f"{path} cannot be loaded: {error}") from error


def why_not() -> str | None:
    """Return why the search in C cannot be used here; None if it can."""
    try:
        library()
    except CannotCompile as error:
        return str(error)
    return None


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get(COMPILER_VARIABLE, ""))
    if named:
        return named if shutil.which(named[0]) else None
    return next(([path] for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or Path.home()) / ".cache"
    folder = Path(base) / "paceline" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except OSError:
        pass
    return _own_folder()


@lru_cache(maxsize=1)
def _own_folder() -> Path:
    """A folder of this process, where the user's cache cannot be written."""
    holder = tempfile.TemporaryDirectory(prefix="paceline-")
    _HOLDERS.append(holder)
    return Path(holder.name)


_HOLDERS: list[Any] = []


def _compile(compiler: list[str], path: Path) -> None:
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    command = [*compiler, *FLAGS, str(SOURCE), "-o", str(aside), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise CannotCompile(f"`{shlex.join(command)}` failed: {done.stderr.strip()[-500:]}")
        aside.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompile(f"`{shlex.join(command)}` failed: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    number, size, real, array = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    found.paceline_decoder_new.restype = ctypes.c_void_p
    found.paceline_decoder_new.argtypes = [number, *[array] * 4, size, *[array] * 4, *[real] * 4]
    found.paceline_decoder_model.argtypes = [
        array, number, number, *[size] * 4, array, size, array, array, array, size, array, array, _ADVANCE,
    ]  # fmt: skip
    found.paceline_decoder_free.argtypes = [array]
    found.paceline_decoder_free.restype = None
    found.paceline_decode.argtypes = [array, array, size, size, number, real, real, real, number, number, array, array]
    found.paceline_decode.restype = number
    return found


class NativeSearch:
    """Search of utterances on the CPU, by the compiled library."""

    def __init__(
        self, alphabet: Alphabet, table: WordTable, model: LanguageModel | None, weights: Weights, limits: Limits
    ) -> None:
        self._library = library()
        self._limits = limits
        self._blank = alphabet.blank
        arrays = [alphabet.hashes, alphabet.powers, alphabet.lengths, alphabet.starts.astype(np.uint8)]
        words = [table.hashes, table.words, table.partials, table.is_hot.astype(np.uint8)]
        self._held: list[Any] = [*arrays, *words]  # the library points into them
        self._decoder = self._library.paceline_decoder_new(
            alphabet.blank, *map(_address, arrays), len(table.hashes), *map(_address, words),
            weights.lm_weight, weights.word_bonus, weights.unknown_offset, weights.hotword_weight,
        )  # fmt: skip
        if not self._decoder:
            raise MemoryError("tables of the words")
        self._threads = True
        if model is not None:
            self._add(model, weights)

    def _add(self, model: LanguageModel, weights: Weights) -> None:
        tables = model.tables
        start = model.start if weights.boundary else model.empty
        facts = (model.order, int(weights.boundary), len(model.words), start, model.end, model.unknown)
        if tables is None:
            self._threads = False  # Python answers, one question at a time
            ask = _ADVANCE(_asker(model))
            self._held.append(ask)
            self._library.paceline_decoder_model(self._decoder, *facts, None, 0, None, None, None, 0, None, None, ask)
            return
        self._held.append(tables)
        failed = self._library.paceline_decoder_model(
            self._decoder, *facts, _address(tables.unigrams),
            len(tables.keys), *map(_address, (tables.keys, tables.log_probs, tables.nexts)),
            len(tables.backoffs), _address(tables.backoffs), _address(tables.fails), _ADVANCE(),
        )  # fmt: skip
        if failed:
            raise MemoryError("tables of the language model")

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._library.paceline_decoder_free(self._decoder)
            self._decoder = None

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int = 1) -> list[list[Found]]:
        """Return the best results of each utterance; `log_probs` is (batch, frames, classes)."""
        rows = np.ascontiguousarray(log_probs.detach().float().cpu().numpy())
        jobs = [(rows[number, :length], num_wanted) for number, length in enumerate(lengths)]
        threads = min(torch.get_num_threads(), len(jobs)) if self._threads else 1
        if threads < 2:
            return [self._search(*job) for job in jobs]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda job: self._search(*job), jobs))

    def _search(self, frames: NDArray[np.float32], num_wanted: int) -> list[Found]:
        limits, num = self._limits, min(num_wanted, self._limits.beam_width)
        paths = np.empty((num, len(frames)), np.int32)
        scores = np.empty((num, 3))
        count = self._library.paceline_decode(
            self._decoder, _address(frames), len(frames), frames.shape[1], limits.beam_width, limits.beam_log_prob,
            limits.token_log_prob, FLOOR, int(limits.prune_history), num, _address(paths), _address(scores),
        )  # fmt: skip
        if count < 0:
            raise MemoryError("beams of a search")
        return [Found(path, *map(float, score)) for path, score in zip(paths[:count], scores[:count], strict=True)]


def _asker(model: LanguageModel) -> Any:
    known: dict[tuple[int, int], tuple[float, int]] = {}

    def ask(state: int, word: int, following: Any) -> float:
        found = known.get((state, word))
        if found is None:
            log_probs, states = model.advance(np.array([state]), np.array([word]))
            found = known[state, word] = float(log_probs[0]), int(states[0])
        following[0] = found[1]
        return found[0]

    return ask


def _address(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
