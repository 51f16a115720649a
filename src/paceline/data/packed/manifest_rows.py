"""Packed speech as rows of a manifest: its lines are the rows of the file, counted from 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.manifest.columns import Manifest
from paceline.data.packed.errors import PackedMisfit
from paceline.data.packed.reader import Packed, Stream, open_packed
from paceline.data.strings import Strings


def read_packed(path: Path, *, source: int, needs_text: bool) -> Manifest:
    """All utterances of a packed file, which is this source of the manifest."""
    packed = open_packed(path)
    texts = packed.of_kind("text")
    if texts is None and needs_text:
        hint = "pack the manifest with its texts: `paceline pack train.json train.h5`"
        raise PackedMisfit(path, "holds no texts", hint)
    number = len(packed)
    return Manifest(
        (),
        audio=packed.tags,
        texts=Strings(np.zeros(0, np.uint8), np.zeros(number + 1, np.int64)) if texts is None else strings(texts),
        durations=durations(packed),
        offsets=np.full(number, np.nan),
        source_of=np.full(number, source, np.int32),
        line_of=np.arange(1, number + 1, dtype=np.int32),
    )


def no_audio(path: Path, packed: Packed) -> PackedMisfit:
    """The mistake of taking other packed data for audio."""
    there = ", ".join(f"{name} ({packed.stream(name).kind})" for name in packed.names)
    hint = "pack the manifest: `paceline pack train.json train.h5`"
    return PackedMisfit(path, f"holds no audio of a known sample rate, but {there}", hint)


def durations(packed: Packed) -> NDArray[np.float64]:
    """Seconds of each utterance: as its manifest said, else by its samples."""
    audio, rate = packed.of_kind("audio"), packed.sample_rate
    if "lengths" in packed.columns and (audio is not None or packed.of_kind("features") is not None):
        return packed.columns["lengths"].astype(np.float64)
    if audio is None or rate is None:
        raise no_audio(packed.path, packed)
    return audio.lengths / rate


def strings(stream: Stream) -> Strings:
    """A stream of text as a column in memory."""
    values = [steps[:] for _, _, steps in stream.parts()]
    starts = np.zeros(len(stream) + 1, np.int64)
    np.cumsum(stream.lengths, out=starts[1:])
    return Strings(np.concatenate(values).astype(np.uint8, copy=False), starts)
