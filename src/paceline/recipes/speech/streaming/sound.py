"""Audio block by block: from a file of any length, or from a pipe."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import soxr
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.recipes.speech.audio.file import AudioUnreadable, opened
from paceline.recipes.speech.audio.read import EXACT

BLOCK_S = 1.0
_HEADER = 12
_MOST_HEADER_BYTES = 1 << 24
_LEAST_RATE, _MOST_RATE = 1000, 768_000
_UNKNOWN_FROM = 0x7FFFF000
"""Lengths in a header that was written before the samples: 0 (GStreamer), 2 GiB (sox, arecord), 4 GiB (ffmpeg)."""
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
                    raise AudioUnreadable(path, "is damaged: it holds values that are no numbers")
                block = block * np.float32(32768)
            if block.ndim == 2:
                block = block.astype(np.float32).mean(axis=1, dtype=np.float32)
            is_last = len(block) < number
            yield resampled(block, is_last=is_last)
            if is_last:
                return


def pipe_blocks(pipe: IO[bytes], sample_rate: int, rate: int | None) -> Iterator[NDArray[np.int16]]:
    """Yield samples as they arrive: raw ones of 16 bits, little-endian, at `rate` (the model's, if None), or those of a
    WAV, which says its rate itself. WAVs that follow each other are read as one recording."""
    begin = _read_exactly(pipe, _HEADER)
    if not begin:
        raise NotPcm("ended before the first sample")
    if _is_compressed(begin):
        raise NotPcm("is a compressed file, not samples")
    if not _is_wav(begin):
        yield from _samples(_pieces(pipe, begin), 1, _Resampler(rate or sample_rate, sample_rate))
        return
    while _is_wav(begin):
        form = _wav_header(pipe)
        if rate is not None and form.rate != rate:
            why = f"is a WAV of {form.rate} Hz, and `--rate` says {rate}: leave it out"
            raise NotPcm(why)
        pieces = _pieces(pipe, b"", form.num_bytes)
        yield from _samples(pieces, form.channels, _Resampler(form.rate, sample_rate))
        begin = _behind_samples(pipe, form.num_bytes)


def _pieces(pipe: IO[bytes], begin: bytes, most: int | None = None) -> Iterator[bytes]:
    """Yield bytes as they arrive, up to `most`, and at the end b""."""
    left = float("inf") if most is None else most
    if begin:
        yield begin
    while left > 0:
        number = int(min(left, 1 << 16))
        more = pipe.read1(number) if hasattr(pipe, "read1") else pipe.read(min(number, 1 << 12))
        if not more:
            break
        left -= len(more)
        yield more
    yield b""


def _samples(pieces: Iterator[bytes], channels: int, resampled: _Resampler) -> Iterator[NDArray[np.int16]]:
    """Yield samples of one channel at the model's rate; half a sample at the end is dropped."""
    frame = 2 * channels
    rest = b""
    for more in pieces:
        rest += more
        whole = len(rest) // frame * frame
        samples: NDArray[Any] = np.frombuffer(rest[:whole], "<i2").astype(np.int16)
        rest = rest[whole:]
        if channels > 1:
            samples = samples.reshape(-1, channels).astype(np.float32).mean(axis=1)
        if len(samples) or not more:
            yield resampled(samples, is_last=not more)


def _is_wav(begin: bytes) -> bool:
    return begin[:4] == b"RIFF" and begin[8:12] == b"WAVE"


def _is_compressed(begin: bytes) -> bool:
    """Return True if bytes are how a file of FLAC, Ogg, MP3, MP4, Matroska, AIFF, RF64 or CAF begins.

    An MP3 without a tag begins with set bits, a layer and a bit rate; of loud samples, one stream in 20,000 does, too.
    """
    names = (b"fLaC", b"OggS", b"ID3\x02", b"ID3\x03", b"ID3\x04", b"\x1aE\xdf\xa3", b"FORM", b"RF64", b"caff")
    is_mp3 = begin[:2] in (b"\xff\xfa", b"\xff\xfb", b"\xff\xf2", b"\xff\xf3") and begin[2:3] not in (b"", b"\0")
    return begin[:4] in names or begin[4:8] == b"ftyp" or is_mp3


class _Form(NamedTuple):
    """Form of a WAV's samples."""

    rate: int
    channels: int
    num_bytes: int | None
    """Bytes of samples; None if the program that wrote the header did not know, and they go on to the end."""


def _wav_header(pipe: IO[bytes]) -> _Form:
    """Read up to the samples."""
    found: tuple[int, int] | None = None
    num_bytes = 0
    while True:
        chunk = _read_exactly(pipe, 8)
        if len(chunk) < 8:
            raise NotPcm("ends within the header of a WAV")
        name, length = struct.unpack("<4sI", chunk)
        if name == b"data":
            break
        num_bytes += length
        if num_bytes > _MOST_HEADER_BYTES:
            raise NotPcm("has a WAV header without an end")
        body = _read_exactly(pipe, length + length % 2)
        if name == b"fmt " and len(body) >= 16:
            kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            if kind == _EXTENSIBLE and len(body) >= 26:  # the first two bytes of an identifier say what it is
                kind = struct.unpack("<H", body[24:26])[0]
            if kind not in (_PCM, _EXTENSIBLE) or bits != 16 or not channels or not _LEAST_RATE <= rate <= _MOST_RATE:
                raise NotPcm(f"is a WAV of {bits} bits, format {kind}, {rate} Hz; only 16-bit PCM is read")
            found = rate, channels
    if found is None:
        raise NotPcm("is a WAV that does not say its format")
    return _Form(*found, num_bytes=None if length == 0 or length >= _UNKNOWN_FROM else length)


def _behind_samples(pipe: IO[bytes], num_bytes: int | None) -> bytes:
    """Skip chunks behind the samples (LIST, id3) up to the end; return how another WAV begins if one follows."""
    if num_bytes is None:
        return b""
    _read_exactly(pipe, num_bytes % 2)
    while len(chunk := _read_exactly(pipe, 8)) == 8:
        name, length = struct.unpack("<4sI", chunk)
        if name == b"RIFF":
            return chunk + _read_exactly(pipe, _HEADER - 8)
        left = length + length % 2
        while left > 0 and (skipped := pipe.read(min(left, 1 << 16))):
            left -= len(skipped)
    return b""


def _read_exactly(pipe: IO[bytes], number: int) -> bytes:
    data = b""
    while len(data) < number and (more := pipe.read(number - len(data))):
        data += more
    return data
