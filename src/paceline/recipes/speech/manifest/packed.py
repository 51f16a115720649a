"""Packed speech as rows of a manifest: its lines are the rows of the file, counted from 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.packed.errors import PackedMisfit, is_packed
from paceline.data.packed.reader import Packed, Stream, open_packed
from paceline.data.packed.verify import verify
from paceline.data.strings import Strings
from paceline.recipes.speech.manifest.columns import Manifest

LOOK_BYTES = 256 << 20
"""Bytes of a stream that a quick check reads: all of a small one, and blocks from all over a large one."""


def read_packed(path: Path, *, source: int, needs_text: bool) -> Manifest:
    """Return all utterances of a packed file, which is number `source` of the manifest's files."""
    packed = open_packed(path)
    texts, durations = packed.of_kind("text"), packed.seconds()
    if texts is None and needs_text:
        hint = "pack the manifest with its texts: `paceline pack train.json train.h5`"
        raise PackedMisfit(path, "holds no texts", hint)
    if durations is None:
        raise no_audio(packed.path, packed)
    number = len(packed)
    return Manifest(
        (),
        audio_names=packed.tags,
        texts=Strings(np.zeros(0, np.uint8), np.zeros(number + 1, np.int64)) if texts is None else strings(texts),
        durations=durations,
        offsets=np.full(number, np.nan),
        source_numbers=np.full(number, source, np.int32),
        lines=np.arange(1, number + 1, dtype=np.int32),
    )


def no_audio(path: Path, packed: Packed) -> PackedMisfit:
    """Return the error of taking other packed data for audio."""
    streams = ", ".join(f"{name} ({packed.stream(name).kind})" for name in packed.names)
    hint = "pack the manifest: `paceline pack train.json train.h5`"
    return PackedMisfit(path, f"holds no audio of a known sample rate, but {streams}", hint)


def strings(stream: Stream) -> Strings:
    """Return a stream of text as a column in memory."""
    values = [steps[:] for _, _, steps in stream.parts()]
    starts = np.zeros(len(stream) + 1, np.int64)
    np.cumsum(stream.lengths, out=starts[1:])
    return Strings(np.concatenate(values).astype(np.uint8, copy=False), starts)


def packed_rows(manifest: Manifest, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of these rows that come from packed files."""
    numbers = [number for number, path in enumerate(manifest.sources) if is_packed(path)]
    return rows[np.isin(manifest.source_numbers[rows], numbers)] if numbers else rows[:0]


def damaged_rows(manifest: Manifest, rows: NDArray[np.int64], *, whole: bool) -> dict[int, str]:
    """Return the damage to packed rows of a manifest, by row; without `whole` only a sample of the blocks is read."""
    reasons: dict[int, str] = {}
    for number in np.unique(manifest.source_numbers[rows]).tolist():
        file_rows = rows[manifest.source_numbers[rows] == number]
        lines = manifest.lines[file_rows] - 1
        damages, _ = verify(open_packed(manifest.sources[number]), most_bytes=None if whole else LOOK_BYTES)
        for damage in damages:
            hit = file_rows[(lines >= damage.rows[0]) & (lines <= damage.rows[-1])]
            reasons |= dict.fromkeys(hit.tolist(), f"{damage.stream}: the bytes are not those that were written")
    return reasons
