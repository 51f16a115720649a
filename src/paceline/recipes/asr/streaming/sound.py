"""Audio block by block: from a file of any length, or from a pipe."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import soxr
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.language import phrase
from paceline.data.audio.file import AudioUnreadable, opened
from paceline.data.audio.read import EXACT

BLOCK_S = 1.0
_HEADER = 12
_MOST_HEADER_BYTES = 1 << 16
_PCM, _EXTENSIBLE = 1, 0xFFFE


class NotPcm(PacelineError):
    """Standard input that is no audio of a known form."""

    why: str
    sentence = "standard input: {why}"
    hint = (
        "send 16-bit samples (`ffmpeg -i talk.mp3 -f s16le -ac 1 -ar 16000 - | paceline infer RUN -`), with `--rate` "
        "if they are not at the model's rate, or a WAV of 16 bits"
    )


class _Resampler:
    """16-bit samples at another rate, without an end in sight."""

    def __init__(self, rate: int, wanted: int) -> None:
        self._stream = None if rate == wanted else soxr.ResampleStream(rate, wanted, 1, dtype="float32")

    def __call__(self, samples: NDArray[Any], *, is_last: bool = False) -> NDArray[np.int16]:
        """Return what is ready of (samples) in units of 16 bits."""
        sound = samples
        if self._stream is not None:
            sound = self._stream.resample_chunk(samples.astype(np.float32), last=is_last)
        elif samples.dtype == np.int16:
            return samples
        rounded: NDArray[np.int16] = np.clip(np.rint(sound), -32768, 32767).astype(np.int16)
        return rounded


def file_blocks(path: Path, sample_rate: int) -> Iterator[NDArray[np.int16]]:
    """Yield the samples of a file at a rate, one channel, a second at a time."""
    with opened(path) as file:
        rate, number = file.samplerate, max(1, round(BLOCK_S * file.samplerate))
        resampled = _Resampler(rate, sample_rate)
        dtype = "int16" if file.subtype in EXACT else "float32"
        while True:
            block: NDArray[Any] = file.read(number, dtype=dtype)
            if dtype == "float32":
                if not np.isfinite(block).all():
                    raise AudioUnreadable(path, phrase("is damaged: it holds values that are no numbers"))
                block = block * np.float32(32768)
            if block.ndim == 2:
                block = block.astype(np.float32).mean(axis=1, dtype=np.float32)
            is_last = len(block) < number
            yield resampled(block, is_last=is_last)
            if is_last:
                return


def pipe_blocks(pipe: IO[bytes], sample_rate: int, rate: int | None) -> Iterator[NDArray[np.int16]]:
    """Yield samples as they arrive: raw ones of 16 bits, little-endian, at `rate` (the model's, if None), or those
    behind the header of a WAV, which says its rate itself."""
    begin = _read_exactly(pipe, _HEADER)
    channels = 1
    if begin[:4] == b"RIFF" and begin[8:] == b"WAVE":
        rate, channels = _wav_header(pipe)
        begin = b""
    elif _is_compressed(begin):
        raise NotPcm(phrase("is a compressed file, not samples"))
    elif not begin:
        raise NotPcm(phrase("ended before the first sample"))
    resampled = _Resampler(rate or sample_rate, sample_rate)
    frame = 2 * channels
    rest = begin
    while True:
        more = pipe.read1(1 << 16) if hasattr(pipe, "read1") else pipe.read(1 << 12)
        rest += more
        whole = len(rest) // frame * frame
        samples: NDArray[Any] = np.frombuffer(rest[:whole], "<i2").astype(np.int16)
        rest = rest[whole:]
        if channels > 1:
            samples = samples.reshape(-1, channels).astype(np.float32).mean(axis=1)
        if len(samples) or not more:
            yield resampled(samples, is_last=not more)
        if not more:
            return


def _is_compressed(begin: bytes) -> bool:
    """Return True if bytes are how a file of FLAC, Ogg, MP3, MP4, Matroska, AIFF, RF64 or CAF begins.

    An MP3 without a tag begins with set bits, a layer and a bit rate; of loud samples, one stream in 20,000 does, too.
    """
    names = (b"fLaC", b"OggS", b"ID3\x02", b"ID3\x03", b"ID3\x04", b"\x1aE\xdf\xa3", b"FORM", b"RF64", b"caff")
    is_mp3 = begin[:2] in (b"\xff\xfa", b"\xff\xfb", b"\xff\xf2", b"\xff\xf3") and begin[2:3] not in (b"", b"\0")
    return begin[:4] in names or begin[4:8] == b"ftyp" or is_mp3


def _wav_header(pipe: IO[bytes]) -> tuple[int, int]:
    """Read up to the samples; return rate and channels."""
    found: tuple[int, int] | None = None
    num_bytes = 0
    while True:
        chunk = _read_exactly(pipe, 8)
        if len(chunk) < 8:
            raise NotPcm(phrase("ends within the header of a WAV"))
        name, length = struct.unpack("<4sI", chunk)
        if name == b"data":
            break
        num_bytes += length
        if num_bytes > _MOST_HEADER_BYTES:
            raise NotPcm(phrase("has a WAV header without an end"))
        body = _read_exactly(pipe, length + length % 2)
        if name == b"fmt " and len(body) >= 16:
            kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            if kind not in (_PCM, _EXTENSIBLE) or bits != 16 or not channels or not rate:
                raise NotPcm(
                    phrase("is a WAV of {bits} bits, format {kind}; only 16-bit PCM is read", bits=bits, kind=kind)
                )
            found = rate, channels
    if found is None:
        raise NotPcm(phrase("is a WAV that does not say its format"))
    return found


def _read_exactly(pipe: IO[bytes], number: int) -> bytes:
    data = b""
    while len(data) < number and (more := pipe.read(number - len(data))):
        data += more
    return data
