"""Long recordings and live audio through a model: `paceline infer RUN hours.flac`, `paceline infer RUN -`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.json_text import json_text
from paceline.core.together import Exclusion
from paceline.observe.bars import SideBar
from paceline.recipes.speech.audio.file import AudioFacts, AudioUnreadable
from paceline.recipes.speech.audio.trim import Loudness
from paceline.recipes.speech.data.inputs import InputsUnreadable, measure_all
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.streaming.sound import file_blocks, pipe_blocks
from paceline.recipes.speech.streaming.windows import PAUSE_S, Listener, Norm, Statistics, Word
from paceline.recipes.speech.text.pieces import Pieces

STANDARD_INPUT = "-"
_STATISTICS_S = 30.0
"""Seconds of audio whose features are computed at a time for the statistics of a file."""
_DIGITS = 3


class StreamsAreGreedy(PacelineError):
    """A beam, for audio that is read in windows."""

    what: str
    sentence = "{what} is read in windows, and `--decoder beam` reads whole recordings"
    hint = "set `--decoder greedy`, or set `--long-s` above the length of the recording to read it as a whole"


class StreamsAreForCtc(PacelineError):
    """Windows, for a transducer."""

    what: str
    excludes = (
        Exclusion(
            "`infer` on long or live audio",
            "a transducer",
            "not written",
            "The text of a window depends on all labels before it: windows would have to carry their state on.",
        ),
    )
    sentence = "{what} is read in windows, and a transducer reads whole recordings: each label depends on those before"
    hint = "set `--long-s` above the length of the recording, or cut it into utterances; live audio needs `--head ctc`"


class NotAlone(PacelineError):
    """Standard input beside files."""

    words: Sequence[str]
    sentence = "`-` is audio from standard input, and {number:#word} more are given"
    hint = "give `-` alone"

    @property
    def number(self) -> int:
        return len(self.words) - 1


class NoFileYet(PacelineError):
    """Statistics of a whole file, of audio that has not ended."""

    sentence = "`--stream-norm file` needs all of the audio before the first word, and live audio has no end"
    hint = "leave it out, or set `--stream-norm running` or `--stream-norm window`"


@dataclass(frozen=True)
class LongText:
    """Text of a recording, with the times of its words."""

    text: str
    words: list[Word]


@dataclass(frozen=True)
class Windows:
    """Windows in which long recordings are read."""

    window_s: float = 30.0
    overlap_s: float = 4.0
    norm: Norm = "file"
    pause_s: float = PAUSE_S
    trims: bool = False
    """Silence at both ends of a recording is cut off, as of one that is read as a whole."""


def file_statistics(
    model: AcousticModel, blocks: Iterable[NDArray[np.int16]], progress: Callable[[int], None] | None = None
) -> Statistics:
    """Return mean and deviation of all features of a recording, as if it were one utterance."""
    front = model.features
    statistics = Statistics()
    edge, hop = front.edge_frames, front.hop_samples
    piece = round(_STATISTICS_S * front.sample_rate / hop) * hop
    samples = np.zeros(0, np.int16)
    lead = done = 0  # frames at the beginning that were counted with the piece before
    for block in blocks:
        samples = np.concatenate([samples, block])
        done += len(block)
        if progress is not None:
            progress(done)
        while len(samples) >= piece + 2 * edge * hop:
            energies = front.log_energies(torch.from_numpy(samples[: piece + 2 * edge * hop])).numpy()
            statistics.add(energies[lead : piece // hop])
            samples, lead = samples[piece - edge * hop :], edge
    statistics.add(front.log_energies(torch.from_numpy(np.ascontiguousarray(samples))).numpy()[lead:])
    return statistics


def transcribe_long(
    model: AcousticModel,
    labels: Pieces,
    path: Path,
    windows: Windows,
    progress: Callable[[int], None] | None = None,
) -> LongText:
    """Read a file of any length in windows; memory does not grow with it. `progress` gets samples, of each time that
    the file is read (`num_passes`). Times count from the beginning of the file, trimmed or not."""
    rate = model.features.sample_rate
    total = 0

    def counted() -> Iterator[NDArray[np.int16]]:
        nonlocal total
        for block in file_blocks(path, rate):
            total += len(block)
            yield block
            if progress is not None:
                progress(total)

    begin, end = 0, None
    if windows.trims:
        loudness = Loudness()
        for block in counted():
            loudness.add(block)
        begin, end = loudness.bounds()
    is_normalized = model.features.settings.normalize != "none"
    statistics = None
    if windows.norm == "file" and is_normalized:
        statistics = file_statistics(model, _between(counted(), begin, end))
    if statistics is not None and statistics.mean is None:
        return LongText("", [])
    listener = Listener(
        model,
        labels,
        step_s=windows.window_s,
        left_s=windows.overlap_s,
        right_s=windows.overlap_s,
        pause_s=windows.pause_s,
        norm=windows.norm if is_normalized else "window",
        statistics=statistics,
    )
    words: list[Word] = []
    for block in _between(counted(), begin, end):
        listener.feed(block)
        words += listener.take_final()
    listener.finish()
    words += listener.words()
    words = [word._replace(start_s=word.start_s + begin / rate, end_s=word.end_s + begin / rate) for word in words]
    return LongText(" ".join(word.text for word in words), words)


def num_passes(model: AcousticModel, windows: Windows) -> int:
    """Return how often `transcribe_long` reads a file."""
    has_statistics = windows.norm == "file" and model.features.settings.normalize != "none"
    return 1 + has_statistics + windows.trims


def _between(blocks: Iterable[NDArray[np.int16]], begin: int, end: int | None) -> Iterator[NDArray[np.int16]]:
    """Yield samples from `begin` up to `end`; all blocks are read."""
    done = 0
    for block in blocks:
        yield block[max(0, begin - done) : None if end is None else max(0, end - done)]
        done += len(block)


def long_files(words: Sequence[str], long_s: float) -> list[Path] | None:
    """Return the audio files that words name, if one of them is longer than `long_s`; None if none is, or if one of the
    words is no audio file: then all are read as usual, and what is wrong is said there."""
    paths = [Path(word) for word in words]
    if not paths or not all(map(os.path.isfile, paths)) or any(_is_list(path) for path in paths):
        return None
    measured = measure_all(paths)
    if not any(isinstance(facts, AudioFacts) and facts.seconds > long_s for facts in measured.values()):
        return None
    bad = [str(facts) for facts in measured.values() if isinstance(facts, AudioUnreadable)]
    if bad:
        raise InputsUnreadable(bad, len(bad), "mend them or leave them out")
    return paths


def infer_long(
    model: AcousticModel, labels: Pieces, paths: Sequence[Path], windows: Windows, out: IO[str], *, as_json: bool
) -> int:
    """Write a line for each file; return how many there are."""
    for index, path in enumerate(paths):
        facts = measure_all([path])[path]
        assert isinstance(facts, AudioFacts)
        with SideBar(path.name, num_passes(model, windows) * round(facts.seconds * model.features.sample_rate)) as bar:
            found = transcribe_long(model, labels, path, windows, bar.show)
        if as_json:
            words = [_json(word) for word in found.words]
            line = {"index": index, "name": str(path), "prediction": found.text, "words": words}
            out.write(json_text(line) + "\n")
        else:
            out.write(f"{path}\t{found.text}\n")
        out.flush()
    return len(paths)


def infer_live(
    listener: Listener, pipe: IO[bytes], out: IO[str], *, rate: int | None, as_json: bool, screen: bool
) -> str:
    """Write text while audio arrives on a pipe, until it ends or the user interrupts; return the whole text."""
    show = _Json(out) if as_json else _Screen(out) if screen else _Plain(out)
    said: list[str] = []
    try:
        for block in pipe_blocks(pipe, listener.sample_rate, rate):
            listener.feed(block)
            final = listener.take_final()
            said += [word.text for word in final]
            show.update(final, listener.partial, listener.heard_s)
    except KeyboardInterrupt:
        pass  # what was heard is said
    listener.finish()
    rest = listener.words()
    said += [word.text for word in rest]
    show.update(rest, "", listener.heard_s)
    show.end(" ".join(said))
    return " ".join(said)


class _Plain:
    """Final words, as they come."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._is_first = out, True

    def update(self, final: Sequence[Word], partial: str, heard_s: float) -> None:
        for word in final:
            self._out.write(word.text if self._is_first else f" {word.text}")
            self._is_first = False
        if final:
            self._out.flush()

    def end(self, text: str) -> None:
        self._out.write("\n")
        self._out.flush()


class _Screen:
    """Final words, and behind them in grey what may still change."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._line = out, ""

    def update(self, final: Sequence[Word], partial: str, heard_s: float) -> None:
        width = max(20, shutil.get_terminal_size().columns - 1)
        self._out.write("\r\x1b[K")
        for word in final:
            if len(self._line) + 1 + len(word.text) > width:
                self._out.write(f"{self._line}\n")
                self._line = ""
            self._line = f"{self._line} {word.text}".strip()
        room = width - len(self._line) - 1
        grey = f" \x1b[2m{partial[:room]}\x1b[0m" if partial and room > 0 else ""
        self._out.write(f"{self._line}{grey}")
        self._out.flush()

    def end(self, text: str) -> None:
        self._out.write("\n")
        self._out.flush()


class _Json:
    """A line whenever something has changed, and one at the end."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._partial = out, ""

    def update(self, final: Sequence[Word], partial: str, heard_s: float) -> None:
        if final or partial != self._partial:
            words = [_json(word) for word in final]
            self._put({"final": words, "partial": partial, "heard_s": round(heard_s, _DIGITS)})
            self._partial = partial

    def end(self, text: str) -> None:
        self._put({"text": text})

    def _put(self, line: dict[str, Any]) -> None:
        self._out.write(json_text(line) + "\n")
        self._out.flush()


def _json(word: Word) -> dict[str, Any]:
    """Return a word under the names that it has of short recordings, too."""
    return {"word": word.text, "start": round(word.start_s, _DIGITS), "end": round(word.end_s, _DIGITS)}


def _is_list(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith((".json", ".jsonl", ".tar", ".h5", ".hdf5", ".hdf"))


def standard_input() -> IO[bytes]:
    """Return standard input as bytes, as they come."""
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
