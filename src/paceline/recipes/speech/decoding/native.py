"""The search in C: compiled when it is first used, kept in the user's cache, run by one thread per core.

A C compiler is all it needs (Triton needs one for its launchers as well). Where there is none, `search.py` does the
same in Python: same words, same scores, a hundred times slower; `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.language import translate
from paceline.core.terminal import warn
from paceline.core.torch_private import compile_cuda
from paceline.recipes.speech.decoding.limits import FLOOR, Found, Limits, Weights, not_log_probs
from paceline.recipes.speech.decoding.ngram import LanguageModel
from paceline.recipes.speech.decoding.search import remembered
from paceline.recipes.speech.decoding.words import Alphabet, WordTable

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
    if _is_ours(path):
        try:
            return _declared(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):
            pass  # cut short, or of another system: made anew
    _compile(compiler, path)
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
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
        if not _is_private(folder.stat()):
            why = "others may write it"
        elif os.access(folder, os.W_OK):
            return folder
        else:
            why = "it cannot be written"
    except OSError as error:
        why = error.strerror or str(error)
    own = _own_folder()
    told = translate("the beam search is compiled for this process alone, for it cannot be kept in {folder}: {why}")
    warn(f"{told.format(folder=folder, why=why)}\n")
    return own


def _is_private(facts: os.stat_result) -> bool:
    """Return True for what is this user's, and nobody else may change."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def _is_ours(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and _is_private(facts)


@lru_cache(maxsize=1)
def _own_folder() -> Path:
    """A folder of this process, where the user's cache cannot be written."""
    try:
        holder = tempfile.TemporaryDirectory(prefix="paceline-")
    except OSError as error:
        raise CannotCompile(f"there is no folder for it: {error}") from error
    _HOLDERS.append(holder)
    return Path(holder.name)


_HOLDERS: list[Any] = []


def _compile(compiler: list[str], path: Path) -> None:
    try:
        file, name = tempfile.mkstemp(".tmp", f"{path.stem}.", path.parent)  # machines may share the folder
    except OSError as error:
        raise CannotCompile(f"{path.parent} cannot be written: {error}") from error
    os.close(file)
    aside = Path(name)
    command = [*compiler, *FLAGS, str(SOURCE), "-o", str(aside), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise CannotCompile(f"`{shlex.join(command)}` failed: {done.stderr.strip()[-500:]}")
        aside.chmod(0o700)
        aside.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompile(f"`{shlex.join(command)}` failed: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.paceline_search.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    found.paceline_search.restype = ctypes.c_int32
    return found


_REALS: Final = ("weight", "bonus", "unknown_offset", "hotword_weight", "prune", "least", "floor_log_prob")
_FIELDS: Final = (
    "num_labels", "piece_hash", "piece_power", "piece_length", "starts", "num_slots", "slots",
    "has_model", "order", "boundary", "num_words", "start", "end", "unknown",
    "unigrams", "keys", "first", "log_probs", "nexts", "backoffs", "fails", "advance",
    "weight", "bonus", "unknown_offset", "hotword_weight",
    "width", "prune_history", "num_wanted", "max_tokens", "prune", "least", "floor_log_prob",
)  # fmt: skip


class _Decoder(ctypes.Structure):
    """`Decoder` of search.c: pointers and whole numbers of 8 bytes, and doubles."""

    _fields_ = [(name, ctypes.c_double if name in _REALS else ctypes.c_int64) for name in _FIELDS]


_SLOT: Final = np.dtype([("key", "<u8"), ("partial", "<f8"), ("word", "<i4"), ("hot", "<i4")])
_FREE: Final = -2


class Parts(NamedTuple):
    """Arrays and numbers of a search, by the names of search.c."""

    arrays: dict[str, NDArray[Any]]
    numbers: dict[str, float]


def parts_of(
    alphabet: Alphabet, table: WordTable, model: LanguageModel | None, weights: Weights, limits: Limits
) -> Parts:
    """Return what search.c is told."""
    arrays: dict[str, NDArray[Any]] = {
        "piece_hash": alphabet.hashes,
        "piece_power": alphabet.powers,
        "piece_length": alphabet.lengths.astype(np.int64),
        "starts": alphabet.starts.astype(np.uint8),
        "slots": _slots(table),
    }
    # of labels that are probable enough, no frame has more, though each be rounded up to 16 bits
    likely = 1.05 * math.exp(min(-limits.token_log_prob, 700.0)) + 2
    numbers: dict[str, float] = {
        "num_labels": alphabet.blank,
        "num_slots": len(arrays["slots"]),
        "order": 1,
        "weight": weights.lm_weight,
        "bonus": weights.word_bonus,
        "unknown_offset": weights.unknown_offset,
        "hotword_weight": weights.hotword_weight,
        "width": limits.beam_width,
        "prune_history": int(limits.prune_history),
        "max_tokens": int(min(alphabet.blank + 1, likely)),
        "prune": limits.beam_log_prob,
        "least": limits.token_log_prob,
        "floor_log_prob": FLOOR,
    }
    if model is None:
        return Parts(arrays, numbers)
    numbers |= {
        "has_model": 1,
        "order": model.order,
        "boundary": int(weights.boundary),
        "num_words": len(model.words),
        "start": model.start if weights.boundary else model.empty,
        "end": model.end,
        "unknown": model.unknown,
    }
    tables = model.tables
    if tables is not None:
        nodes = np.arange(len(tables.backoffs) + 1)
        arrays |= {
            "unigrams": tables.unigrams,
            "keys": tables.keys,
            "first": np.searchsorted(tables.keys, nodes * tables.num_words),
            "log_probs": tables.log_probs,
            "nexts": tables.nexts,
            "backoffs": tables.backoffs,
            "fails": tables.fails,
        }
    return Parts(arrays, numbers)


def _slots(table: WordTable) -> NDArray[Any]:
    """Return the table of words as a hash table: a word is at its place, or at the first free one after it."""
    if not len(table.hashes):
        return np.zeros(0, _SLOT)
    size = 1 << max(4, (2 * len(table.hashes) - 1).bit_length())
    slots = np.zeros(size, _SLOT)
    slots["word"] = _FREE
    hashes = table.hashes.view(np.uint64)
    rest = np.arange(len(hashes))
    places = (mixed(hashes) & np.uint64(size - 1)).astype(np.int64)
    while len(rest):
        is_free = slots["word"][places] == _FREE
        _, firsts = np.unique(places, return_index=True)
        is_first = np.zeros(len(rest), bool)
        is_first[firsts] = True
        now = is_free & is_first
        numbers, at = rest[now], places[now]
        slots["key"][at], slots["partial"][at] = hashes[numbers], table.partials[numbers]
        slots["word"][at], slots["hot"][at] = table.words[numbers], table.is_hot[numbers]
        rest, places = rest[~now], places[~now]
        places = np.where(slots["word"][places] == _FREE, places, (places + 1) % size)
    return slots


class NativeSearch:
    """Search of utterances on the CPU, by the compiled library."""

    def __init__(
        self, alphabet: Alphabet, table: WordTable, model: LanguageModel | None, weights: Weights, limits: Limits
    ) -> None:
        self._library = library()
        self._limits = limits
        parts = parts_of(alphabet, table, model, weights, limits)
        self._held: list[Any] = [np.ascontiguousarray(array) for array in parts.arrays.values()]
        addresses = {name: array.ctypes.data for name, array in zip(parts.arrays, self._held, strict=True)}
        self._decoder = _Decoder(**parts.numbers, **addresses, num_wanted=limits.beam_width)
        self._failures: list[BaseException] = []
        self._is_threaded = model is None or model.tables is not None
        if model is not None and model.tables is None:  # Python answers, one question at a time
            ask = _ADVANCE(_asker(model, self._failures))
            self._held.append(ask)
            self._decoder.advance = ctypes.cast(ask, ctypes.c_void_p).value

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int = 1) -> list[list[Found]]:
        """Return the best results of each utterance; `log_probs` is (batch, frames, classes)."""
        rows = np.ascontiguousarray(log_probs.detach().float().cpu().numpy())
        jobs = [(rows[number, :length], num_wanted) for number, length in enumerate(lengths)]
        threads = min(torch.get_num_threads(), len(jobs)) if self._is_threaded else 1
        if threads < 2:
            return [self._search(*job) for job in jobs]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda job: self._search(*job), jobs))

    def _search(self, frames: NDArray[np.float32], num_wanted: int) -> list[Found]:
        paths = np.empty((self._limits.beam_width, len(frames)), np.int32)
        scores = np.empty((self._limits.beam_width, 3))
        count = self._library.paceline_search(
            ctypes.addressof(self._decoder), frames.ctypes.data, len(frames), paths.ctypes.data, scores.ctypes.data
        )
        if self._failures:
            first = self._failures[0]
            self._failures.clear()
            raise first
        if count < 0:
            raise not_log_probs() if count == _TOO_MANY_LABELS else MemoryError("beams of a search")
        count = min(count, num_wanted)
        return [Found(path, *map(float, score)) for path, score in zip(paths[:count], scores[:count], strict=True)]


class KernelSearch:
    """Search of utterances on a GPU: the same source compiled for it, a warp for each utterance."""

    def __init__(
        self, alphabet: Alphabet, table: WordTable, model: LanguageModel | None, weights: Weights, limits: Limits
    ) -> None:
        self._parts = parts_of(alphabet, table, model, weights, limits)
        self._limits = limits
        self._held: dict[torch.device, dict[str, Tensor]] = {}
        self._kernels: dict[torch.device, Any] = {}

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int = 1) -> list[list[Found]]:
        """Return the best results of each utterance; `log_probs` is (batch, frames, classes)."""
        batch, frames, _ = log_probs.shape
        device = log_probs.device
        num = min(num_wanted, self._limits.beam_width)
        if not batch:
            return []
        with torch.cuda.device(device):
            kernel = self._kernel(device)
            held = self._held[device]
            addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
            decoder = _Decoder(**self._parts.numbers, **addresses, num_wanted=num)
            there = torch.frombuffer(bytearray(decoder), dtype=torch.uint8).to(device)
            room = _room(self._limits.beam_width, int(self._parts.numbers["max_tokens"]), frames)
            paths = torch.empty(batch, num, max(frames, 1), dtype=torch.int32, device=device)
            scores = torch.empty(batch, num, 3, dtype=torch.float64, device=device)
            counts = torch.empty(batch, dtype=torch.int32, device=device)
            kernel(
                grid=(batch, 1, 1),
                block=(32, 1, 1),
                args=[
                    there,
                    log_probs.detach().float().contiguous(),
                    torch.tensor(list(lengths), dtype=torch.int64, device="cpu").to(device),
                    torch.tensor([frames, room], dtype=torch.int64, device="cpu").to(device),
                    torch.zeros(batch * room, dtype=torch.uint8, device=device),
                    paths,
                    scores,
                    counts,
                ],
            )
            found_paths, found_scores = paths.cpu().numpy(), scores.cpu().numpy()
            found = counts.tolist()
        if min(found) < 0:
            raise not_log_probs()
        return [
            [Found(found_paths[row, rank, :length], *map(float, found_scores[row, rank])) for rank in range(found[row])]
            for row, length in enumerate(lengths)
        ]

    def _kernel(self, device: torch.device) -> Any:
        if device not in self._kernels:
            try:
                self._kernels[device] = compile_cuda(SOURCE.read_text(encoding="utf-8"), "paceline_search")
            except (RuntimeError, OSError) as error:
                raise CannotCompile(f"NVRTC: {str(error)[-500:]}") from error
            self._held[device] = {
                name: torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).to(device)
                for name, array in self._parts.arrays.items()
            }
        return self._kernels[device]


_TOO_MANY_LABELS: Final = -2
_BEAM, _CANDIDATE, _MARK = 200, 80, 16
"""Bytes of the structures of search.c, which rounds nothing."""


def _room(width: int, max_tokens: int, frames: int) -> int:
    """Return the bytes that an utterance is searched in: `room_of` in search.c, in full lines of 128 bytes."""
    marks = 64
    while marks < 4 * width:
        marks *= 2
    beams = 2 * width * _BEAM + max_tokens * width * _CANDIDATE + marks * _MARK
    return -(-(beams + 8 * (frames * width + 1) + 8 * width + 8 * max_tokens) // 128) * 128


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64-bit numbers with their bits well mixed, as search.c does."""
    for _ in range(2):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


def _asker(model: LanguageModel, failures: list[BaseException]) -> Any:
    """Return a function for C to ask; what it raises, Ctrl-C too, would be lost there and is kept in `failures`."""
    advance = remembered(model)

    def ask(state: int, word: int, following: Any) -> float:
        following[0] = state
        if failures:
            return -math.inf
        try:
            log_prob, following[0] = advance(state, word)
        except BaseException as error:
            failures.append(error)
            return -math.inf
        return log_prob

    return ask
