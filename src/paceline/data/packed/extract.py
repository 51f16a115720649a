"""Packed data taken apart again: WAV files and a manifest where it is speech, else arrays, one file per row.

What is written is listed in the folder first, and the manifest comes last: one that was stopped is known by that, and
of an earlier one nothing is left beside the new.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from paceline.core.disk import cannot_write
from paceline.core.errors import PacelineError
from paceline.core.json_text import json_text
from paceline.core.paths import near
from paceline.data.packed.checked import CheckedRows, RowDamaged
from paceline.data.packed.manifest_rows import durations
from paceline.data.packed.reader import Packed

MANIFEST = "manifest.json"
LIST = ".paceline-extracted"
"""Names of files in the folder, as JSON."""


class NothingExtracted(PacelineError):
    """Every row is damaged."""

    hint = "pack it again from what it was made of"

    def __init__(self, packed: Packed) -> None:
        super().__init__(f"{near(packed.path)}: not one of the rows is what was packed")


@dataclass
class Extraction:
    """What was done."""

    manifest: Path
    num_rows: int = 0
    skipped: list[str] = field(default_factory=list)
    num_others: int = 0
    """Files in the folder that no extraction has written, and which stay."""


def is_free(folder: Path) -> bool:
    """Whether nothing is lost there: it is new or empty, or an extraction was stopped in it."""
    if not folder.exists():
        return True
    return folder.is_dir() and (not os.listdir(folder) or ((folder / LIST).exists() and not _has_manifest(folder)))


def extract(
    packed: Packed,
    folder: Path,
    rows: range,
    progress: Callable[[int], None] | None = None,
    *,
    skip_bad: bool = False,
) -> Extraction:
    """Write rows into a folder, beside a manifest of them, in place of what was extracted there before.

    A row that is not what was packed ends it, or is left out.
    """
    is_speech = packed.of_kind("audio") is not None and packed.sample_rate is not None
    names = file_names([packed.tags[row] for row in rows], ".wav" if is_speech else ".npz")
    done, checked, lines = Extraction(folder / MANIFEST), CheckedRows(packed), []
    num_left = _num_bytes(packed, rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        done.num_others = sum(len(files) for _, _, files in os.walk(folder))
        (folder / LIST).write_text(json.dumps(names), encoding="utf-8")
        for number, (row, name) in enumerate(zip(rows, names, strict=True), 1):
            if (damage := checked.damage(row)) is None:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                lines.append(_speech(packed, row, path, name) if is_speech else _arrays(packed, row, path, name))
            elif skip_bad:
                done.skipped.append(f"{packed.tags[row]}: {damage.what}")
            else:
                raise RowDamaged(damage)
            num_left -= _num_bytes(packed, range(row, row + 1))
            if progress is not None:
                progress(number)
        if not lines:
            raise NothingExtracted(packed)
        done.manifest.write_text("".join(f"{line}\n" for line in map(json_text, lines)), encoding="utf-8")
    except OSError as error:
        raise cannot_write(folder, error, num_left, "it begins anew, in the same folder") from error
    done.num_rows = len(lines)
    return done


def _has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def _clear(folder: Path) -> None:
    """Remove what an earlier extraction has written, and nothing else."""
    if not (folder / LIST).exists():
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    try:
        names = [PurePosixPath(name) for name in json.loads((folder / LIST).read_text(encoding="utf-8"))]
    except ValueError:  # a kill came before the first file was written
        names = []
    inside = [name for name in names if not name.is_absolute() and ".." not in name.parts]
    for name in inside:
        (folder / name).unlink(missing_ok=True)
    parents = {folder / parent for name in inside for parent in name.parents if parent.parts}
    for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        if parent.is_dir() and not parent.is_symlink() and not os.listdir(parent):
            parent.rmdir()
    (folder / LIST).unlink()


def _num_bytes(packed: Packed, rows: range) -> int:
    """Of these rows."""
    streams = [packed.stream(name) for name in packed.names]
    steps = [(int(stream.lengths[rows.start : rows.stop].sum()), stream) for stream in streams]
    return sum(number * stream.dtype.itemsize * int(np.prod(stream.shape, dtype=np.int64)) for number, stream in steps)


def file_names(tags: list[str], suffix: str) -> list[str]:
    """A name in a folder for each tag, like it, never outside of the folder, and never twice."""
    taken: set[str] = set()
    names = []
    for number, tag in enumerate(tags, 1):
        parts = [part for part in PurePosixPath(tag.replace("\0", "")).parts if part not in ("/", "..", ".")]
        stem = str(PurePosixPath(*parts).with_suffix("")) if parts else f"row-{number}"
        name = f"{stem}{suffix}" if "#" not in tag else f"{stem}-{number}{suffix}"
        others = (f"{stem}-{other}{suffix}" for other in itertools.count(number))
        while name in taken or name == MANIFEST:
            name = next(others)
        taken.add(name)
        names.append(name)
    return names


def _speech(packed: Packed, row: int, path: Path, name: str) -> dict[str, Any]:
    import soundfile

    audio, text = packed.of_kind("audio"), packed.of_kind("text")
    assert audio is not None
    # In memory first: of a disk that is full libsndfile has nothing to say but that it is an error.
    written = io.BytesIO()
    soundfile.write(written, np.asarray(audio.view(row)), packed.sample_rate, subtype="PCM_16", format="WAV")
    path.write_bytes(written.getbuffer())
    line = {"audio_filepath": name, "duration": float(durations(packed)[row])}
    return {**line, **({} if text is None else {"text": text.text(row)}), **packed.extra(row)}


def _arrays(packed: Packed, row: int, path: Path, name: str) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    texts = {}
    for each in packed.names:
        stream = packed.stream(each)
        if stream.kind == "text":
            texts[each] = stream.text(row)
        else:
            arrays[each] = stream.view(row)[0] if stream.is_single else stream.view(row)
    np.savez(path, allow_pickle=False, **arrays)
    return {**packed.extra(row), "file": name, "tag": packed.tags[row], **texts}
