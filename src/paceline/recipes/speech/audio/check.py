"""Check of audio files against their lines in a manifest, many at a time; decoded as a whole only on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from paceline.core.json_text import json_text
from paceline.core.paths import near
from paceline.recipes.speech.audio.file import (
    TOLERANCE_S,
    TOLERANCE_SHARE,
    AudioFacts,
    AudioUnreadable,
    is_short,
    known_frames,
    missing_end,
    opened,
    read_frames,
    truncated,
)
from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.manifest.bad_line import BadLine, beginning
from paceline.recipes.speech.manifest.columns import Manifest, row_numbers
from paceline.recipes.speech.manifest.packed import damaged_rows, packed_rows

_FILES_AT_ONCE = 32
_END_S = 0.1
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def check(path: Path, duration_s: float, offset_s: float | None = None, *, whole: bool = False) -> str | None:
    """Return what is wrong with a file of which a line gives this length; None if nothing is.

    With an offset the utterance must lie inside the file, without one it must be the whole file. Damage between the
    beginning and the end shows only if the file is decoded as training decodes it, which `whole` does.
    """
    try:
        facts = _readable_to_the_end(path)
        if whole:
            read_audio(path, sample_rate=facts.sample_rate, offset_s=offset_s or 0.0, duration_s=duration_s)
    except AudioUnreadable as unreadable:
        return unreadable.why
    tolerance_s = max(TOLERANCE_S, TOLERANCE_SHARE * duration_s)
    end_s = duration_s + (offset_s or 0.0)
    if end_s > facts.seconds + tolerance_s:
        what = f'"duration" is {duration_s:g}' + (f' and "offset" {offset_s:g}' if offset_s is not None else "")
        return missing_end(path) or f"{what}, but {near(path)} lasts {facts.seconds:.2f} s"
    if offset_s is None and duration_s < facts.seconds - tolerance_s:
        return f'"duration" is {duration_s:g}, but {near(path)} lasts {facts.seconds:.2f} s'
    return None


def measure(path: Path) -> AudioFacts:
    """Return length, rate and channels of a file; raise `AudioUnreadable` if it cannot be read to its end."""
    why = missing_end(path)
    if why is not None:
        raise AudioUnreadable(path, why)
    return _readable_to_the_end(path)


def check_all(
    manifest: Manifest,
    rows: ArrayLike,
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
    whole: bool = False,
) -> list[BadLine]:
    """Return the lines of these rows (numbers, or a mask) whose audio is at fault; `progress` gets the number done."""
    chosen = row_numbers(rows)
    packed = packed_rows(manifest, chosen)
    damaged = damaged_rows(manifest, packed, whole=whole) if len(packed) else {}
    bad_lines = [bad_audio(manifest, row, what) for row, what in damaged.items()]

    def look(row: int) -> BadLine | None:
        offset_s = manifest.offset(row) if manifest.is_part(row) else None
        what = check(manifest.audio(row), float(manifest.durations[row]), offset_s, whole=whole)
        return None if what is None else bad_audio(manifest, row, what)

    files = np.setdiff1d(chosen, packed) if len(packed) else chosen
    bad_lines += [bad for bad in in_threads(look, files.tolist(), threads, progress) if bad is not None]
    return sorted(bad_lines, key=lambda bad: bad.row)


def bad_audio(manifest: Manifest, row: int, what: str) -> BadLine:
    """Return the bad line of a row whose audio is at fault."""
    name = near(manifest.audio(row))
    what = what if name in what else f"{name}: {what}"
    return BadLine(manifest.source(row), manifest.line(row), what, _rebuilt(manifest, row), row)


def in_threads(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Answer]:
    """Yield the result of a function for each item, in order; libsndfile works outside of the interpreter's lock."""
    listed = list(items)
    pieces = [listed[first : first + _FILES_AT_ONCE] for first in range(0, len(listed), _FILES_AT_ONCE)]
    pool = ThreadPoolExecutor(threads)
    done = 0
    try:
        for answers in pool.map(lambda piece: [function(item) for item in piece], pieces):
            yield from answers
            done += len(answers)
            if progress is not None:
                progress(done)
    finally:
        pool.shutdown(cancel_futures=True)  # at once, where the caller was interrupted


def _readable_to_the_end(path: Path) -> AudioFacts:
    with opened(path) as file:
        frames, rate = known_frames(file), file.samplerate
        if frames <= 0:
            raise AudioUnreadable(path, missing_end(path) or "holds no samples")
        end = min(frames, round(_END_S * rate))
        file.seek(frames - end)
        readable = frames - end + len(read_frames(file, end, "int16"))
        if readable == frames - end or is_short(readable, frames, rate):
            raise AudioUnreadable(path, truncated(readable, frames, rate))
        return AudioFacts(frames / rate, rate, file.channels)


def _rebuilt(manifest: Manifest, row: int) -> str:
    line = {"audio_filepath": manifest.audio_names[row], "duration": float(manifest.durations[row])}
    if manifest.is_part(row):
        line["offset"] = manifest.offset(row)
    return beginning(json_text({**line, "text": manifest.text(row)}).encode())
