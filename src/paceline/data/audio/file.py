"""An audio file, open for as long as it is read: what libsndfile says of it, and what it does not.

Every failure is an `AudioUnreadable` with the reason in plain words.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.paths import near

SUFFIXES = frozenset((".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".sph", ".w64", ".caf"))
"""By which audio is found in a folder."""
TOLERANCE_S, TOLERANCE_SHARE = 0.1, 0.01
"""A length may differ from what was promised by the larger of these: durations are rounded, and MP3 is padded."""
LOWEST_HZ, HIGHEST_HZ = 1_000, 768_000
"""Sample rates outside are damage to a header; resampling from them could take all memory."""
MOST_FRAMES = 1 << 60
"""libsndfile gives a number above this where a FLAC does not say how long it is."""
SAMPLES_AT_ONCE = 1 << 24
_SYSTEM_ERROR, _UNKNOWN_FORMAT = 2, 1


class AudioUnreadable(PacelineError):
    """A file that does not hold the audio it should."""

    hint = "mend the file or leave it out; `paceline manifest stats FILE --check` finds all such files of a manifest"

    def __init__(self, path: Path, why: str, where: str = "") -> None:
        super().__init__(f"{where}: {near(path)}: {why}" if where else f"{near(path)}: {why}")
        self.path, self.why = path, why


def audio_below(folder: Path) -> list[Path]:
    """The audio files in a folder and in those in it, by name."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


class AudioFacts(NamedTuple):
    """What a file says of itself."""

    seconds: float
    sample_rate: int
    channels: int


class _Sound(soundfile.SoundFile):  # type: ignore[misc]
    def seekable(self) -> bool:
        """What soundfile asks before it seeks, after a read, to where the read has ended: needless, and impossible in a
        FLAC that does not say how long it is."""
        return False


@contextmanager
def opened(path: Path) -> Iterator[soundfile.SoundFile]:
    """A file open for reading; whatever libsndfile has to complain of becomes `AudioUnreadable`."""
    try:
        # A pipe without a writer would otherwise keep us waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise AudioUnreadable(path, "there is no such file") from None
    except (OSError, ValueError) as error:
        raise AudioUnreadable(path, f"cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AudioUnreadable(path, "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a file")
        if status.st_size == 0:
            raise AudioUnreadable(path, "is empty")
        with _Sound(descriptor, closefd=False) as file:
            if not LOWEST_HZ <= file.samplerate <= HIGHEST_HZ:
                raise AudioUnreadable(path, f"is damaged: it claims a sample rate of {file.samplerate} Hz")
            yield file
    except soundfile.LibsndfileError as error:
        raise AudioUnreadable(path, _why(error)) from None
    except OSError as error:
        raise AudioUnreadable(path, f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def known_frames(file: soundfile.SoundFile) -> int:
    """How many frames a file has; one that was written to a pipe does not say, and is decoded to find out."""
    frames: int = file.frames
    if frames > MOST_FRAMES:
        frames = sum(len(block) for block in read_blocks(file, frames, "int16"))
        file.seek(0)
    return frames


def is_short(frames: int, promised: int, rate: int) -> bool:
    """Whether less is there than was promised."""
    return frames <= 0 or frames < promised - max(TOLERANCE_S * rate, TOLERANCE_SHARE * promised)


def truncated(frames: int, promised: int, rate: int) -> str:
    return f"is truncated: {frames / rate:.2f} s of {promised / rate:.2f} s can be read"


def read_frames(file: soundfile.SoundFile, frames: int, dtype: str) -> NDArray[Any]:
    """The next frames, fewer at the end: (frames) for one channel, else (frames, channels)."""
    shape = (frames,) if file.channels == 1 else (frames, file.channels)
    # Into an array of ours: soundfile's own would be as long as the header of a damaged file makes it.
    samples: NDArray[Any] = file.read(out=np.empty(shape, dtype))
    return samples


def read_blocks(file: soundfile.SoundFile, frames: int, dtype: str) -> Iterator[NDArray[Any]]:
    """Up to so many frames, piece by piece: a header may claim any number, and memory is taken for what is there."""
    at_once = max(1, SAMPLES_AT_ONCE // file.channels)
    while frames > 0:
        block = read_frames(file, min(at_once, frames), dtype)
        yield block
        if len(block) < min(at_once, frames):
            return
        frames -= len(block)


def _why(error: soundfile.LibsndfileError) -> str:
    if error.code == _UNKNOWN_FORMAT:
        return "is not audio of a known format"
    if error.code == _SYSTEM_ERROR:  # also where a header is too broken to be one
        return "is not audio, or cannot be read"
    detail = str(error.error_string).removeprefix("Error : ").strip().rstrip(".")
    return "is truncated or damaged" + ("" if "internal" in detail.lower() else f": {detail}")
