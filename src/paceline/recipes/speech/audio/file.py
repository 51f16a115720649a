"""Audio files opened through libsndfile, with its mistakes: it accepts a WAV or Ogg whose end is missing.

Every failure is an `AudioUnreadable` with the reason in plain words.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray

from paceline.core.cloud.file_copy import bring_missing
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.recipes.speech.shards.tar_index import (
    SUFFIX,
    Member,
    ShardUnreadable,
    failure_of,
    open_member,
    split_member,
    tar_index,
)

SUFFIXES = frozenset((".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".sph", ".w64", ".caf"))
"""Suffixes of audio files in a folder."""
TOLERANCE_S, TOLERANCE_SHARE = 0.1, 0.01
"""A length may differ from the promised one by the larger of these: durations are rounded, and MP3 is padded."""
LOWEST_HZ, HIGHEST_HZ = 1_000, 768_000
"""Sample rates outside are damage to a header; resampling from them could take all memory."""
MOST_FRAMES = 1 << 60
"""libsndfile gives a number above this for a FLAC of unknown length."""
SAMPLES_AT_ONCE = 1 << 24
_SYSTEM_ERROR, _UNKNOWN_FORMAT = 2, 1
_MOST_HEADER_BYTES = 1 << 16
_STREAMED = 0x7FFF0000
"""Programs that write to a pipe cannot fill in the length, and leave a number above this, or 0."""
_MOST_PAGE_BYTES = 27 + 255 + 255 * 255
_LEAST_SHARE = 0.99
"""Files that are a percent too short count as whole, like durations that are a percent off."""


class AudioUnreadable(PacelineError):
    """A file that does not hold the audio it should."""

    path: Path
    why: str
    where: str = ""
    """Line of the manifest that names the file."""
    sentence = "{place}: {why}"
    hint = "mend the file or leave it out; `paceline manifest stats FILE --check` finds all such files of a manifest"

    @property
    def place(self) -> str:
        return f"{self.where}: {near(self.path)}" if self.where else near(self.path)


def audio_below(folder: Path) -> list[Path]:
    """Return the audio files below a folder, by name."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


class AudioFacts(NamedTuple):
    """Length and format of a file, by its header."""

    seconds: float
    sample_rate: int
    channels: int


class _Sound(soundfile.SoundFile):  # type: ignore[misc]
    def seekable(self) -> bool:
        """Return False, so that soundfile does not seek after a read: needless, and impossible in a FLAC of unknown
        length."""
        return False


@contextmanager
def opened(path: Path) -> Iterator[soundfile.SoundFile]:
    """Open a file, or a member of a tar file, for reading; every error of libsndfile becomes `AudioUnreadable`."""
    # Not blocking: a pipe without a writer would wait forever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(path, flags)
        except (FileNotFoundError, NotADirectoryError):
            if _is_inside(path):
                descriptor = -1
            elif bring_missing(path):
                descriptor = os.open(path, flags)
            else:
                raise
    except FileNotFoundError as error:
        raise AudioUnreadable(path, "there is no such file") from error
    except OSError as error:
        raise AudioUnreadable(path, f"cannot be opened: {error.strerror or error}") from error
    except ValueError as error:  # a name with a zero byte
        raise AudioUnreadable(path, f"cannot be opened: {error}") from None
    if descriptor < 0:
        with _opened_member(path) as file:
            yield file
        return
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            is_folder = stat.S_ISDIR(status.st_mode)
            raise AudioUnreadable(path, "is a folder" if is_folder else "is not a file")
        if status.st_size == 0:
            raise AudioUnreadable(path, "is empty")
        with _Sound(descriptor, closefd=False) as file:
            _check_rate(path, file)
            yield file
    except soundfile.LibsndfileError as error:
        raise AudioUnreadable(path, _why(error)) from None
    except OSError as error:
        raise AudioUnreadable(path, f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


@contextmanager
def _opened_member(path: Path) -> Iterator[soundfile.SoundFile]:
    shard, member = _member(path)
    if member.size == 0:
        raise AudioUnreadable(path, "is empty")
    try:
        with open_member(shard, member) as raw:
            try:
                with _Sound(raw) as file:
                    _check_rate(path, file)
                    yield file
            except (soundfile.LibsndfileError, AudioUnreadable):
                if (failure := failure_of(raw)) is not None:  # libsndfile takes it for the end of the file
                    raise failure from None
                raise
            if (failure := failure_of(raw)) is not None:
                raise failure
    except soundfile.LibsndfileError as error:
        raise AudioUnreadable(path, _why(error)) from None
    except OSError as error:
        raise AudioUnreadable(path, f"cannot be read: {error.strerror}") from error


def _is_inside(path: Path) -> bool:
    return f"{SUFFIX}/" in str(path) and split_member(path) is not None


def _member(path: Path) -> tuple[Path, Member]:
    """Return the tar file and the place in it of a path inside of one."""
    inside = split_member(path)
    assert inside is not None
    shard, name = inside
    try:
        member = tar_index(shard).find(name)
    except ShardUnreadable as unreadable:
        raise AudioUnreadable(shard, unreadable.why) from unreadable
    if member is None:
        raise AudioUnreadable(path, f'{near(shard)} has no member "{name}"')
    return shard, member


def _check_rate(path: Path, file: soundfile.SoundFile) -> None:
    if not LOWEST_HZ <= file.samplerate <= HIGHEST_HZ:
        why = f"is damaged: it claims a sample rate of {file.samplerate} Hz"
        raise AudioUnreadable(path, why)


def known_frames(file: soundfile.SoundFile) -> int:
    """Return the number of frames; a file that was written to a pipe does not name it, and is decoded."""
    frames: int = file.frames
    if frames > MOST_FRAMES:
        frames = sum(len(block) for block in _blocks(file, frames, "int16"))
        file.seek(0)
    return frames


def probe(path: Path) -> AudioFacts:
    """Return length, rate and channels, from the header if it names them."""
    with opened(path) as file:
        return AudioFacts(known_frames(file) / file.samplerate, file.samplerate, file.channels)


def is_short(frames: int, promised: int, rate: int) -> bool:
    """Return True if there are fewer frames than promised."""
    return frames <= 0 or frames < promised - max(TOLERANCE_S * rate, TOLERANCE_SHARE * promised)


def truncated(frames: int, promised: int, rate: int) -> str:
    """Return the reason for a file that ends too early."""
    return f"is truncated: {frames / rate:.2f} s of {promised / rate:.2f} s can be read"


def read_frames(file: soundfile.SoundFile, frames: int, dtype: str) -> NDArray[Any]:
    """Return the next frames, fewer at the end: (frames) for one channel, else (frames, channels)."""
    if frames * file.channels <= SAMPLES_AT_ONCE:
        return _read_at_once(file, frames, dtype)
    return np.concatenate(list(_blocks(file, frames, dtype)))


def _read_at_once(file: soundfile.SoundFile, frames: int, dtype: str) -> NDArray[Any]:
    shape = (frames,) if file.channels == 1 else (frames, file.channels)
    # Into an array of our own: soundfile's would be as long as the header of a damaged file claims.
    samples: NDArray[Any] = file.read(out=np.empty(shape, dtype))
    return samples


def _blocks(file: soundfile.SoundFile, frames: int, dtype: str) -> Iterator[NDArray[Any]]:
    """Yield up to this many frames in blocks: a header may claim any number, memory is used for those that exist."""
    at_once = max(1, SAMPLES_AT_ONCE // file.channels)
    while frames > 0:
        block = _read_at_once(file, min(at_once, frames), dtype)
        yield block
        if len(block) < min(at_once, frames):
            return
        frames -= len(block)


def missing_end(path: Path) -> str | None:
    """Return the evidence that a file was cut off; None if there is none, or if the file cannot be opened."""
    try:
        if path.is_file():
            file: BinaryIO = path.open("rb")
            size = path.stat().st_size
        elif _is_inside(path):
            shard, member = _member(path)
            file, size = open_member(shard, member), member.size
        else:
            return None
        with file:
            begin = file.read(12)
            if begin[:4] == b"RIFF" and begin[8:] == b"WAVE":
                return _of_wav(file, size)
            if begin[:4] == b"OggS":
                return _of_ogg(file, size)
    except (OSError, AudioUnreadable):
        pass  # opening it for reading gives a better message
    return None


def _of_wav(file: BinaryIO, size: int) -> str | None:
    place = 12
    while place + 8 <= min(size, _MOST_HEADER_BYTES):
        file.seek(place)
        name, length = struct.unpack("<4sI", file.read(8))
        place += 8
        if name == b"data":
            there = size - place
            is_cut = 0 < length < _STREAMED and there < _LEAST_SHARE * length
            return f"is truncated: {there:,} of {length:,} bytes of samples are there" if is_cut else None
        place += length + length % 2
    return None


def _of_ogg(file: BinaryIO, size: int) -> str | None:
    file.seek(max(0, size - _MOST_PAGE_BYTES))
    end = file.read()
    page = end.rfind(b"OggS")
    # Not every program marks the last page, so a file that was cut between two pages shows only by its length.
    if page >= 0 and len(end) >= page + 27:
        num_pieces = end[page + 26]
        pieces = end[page + 27 : page + 27 + num_pieces]
        if len(end) >= page + 27 + num_pieces + sum(pieces):
            return None
    return "is truncated: the last page of its Ogg stream is cut off"


def _why(error: soundfile.LibsndfileError) -> str:
    if error.code == _UNKNOWN_FORMAT:
        return "is not audio of a known format"
    if error.code == _SYSTEM_ERROR:  # also where a header is too broken to be one
        return "is not audio, or cannot be read"
    detail = str(error.error_string).removeprefix("Error : ").strip().rstrip(".")
    return "is truncated or damaged" + ("" if "internal" in detail.lower() else f": {detail}")
