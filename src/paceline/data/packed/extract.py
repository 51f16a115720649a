"""Extraction of packed data: WAV files and a manifest of speech, else arrays, one file per row.

The files to write are listed in the folder first, and the manifest comes last: a folder without one holds an extraction
that was stopped. The list tells which files of an earlier extraction to remove.
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

from paceline.core.disk import cannot_write, is_aside, replacing
from paceline.core.errors import InvalidData
from paceline.core.json_text import json_text
from paceline.core.paths import near
from paceline.data.packed.reader import Packed
from paceline.data.packed.verify import CheckedRows, RowDamaged

MANIFEST = "manifest.json"
LIST = ".paceline-extracted"
"""File in the folder that lists the names of the others, as JSON."""


@dataclass
class Extraction:
    """Files and numbers of a finished extraction."""

    manifest: Path
    num_rows: int = 0
    skipped: list[str] = field(default_factory=list)
    """Reasons why rows were left out."""
    num_others: int = 0
    """Files in the folder that no extraction has written, and that stay."""


def is_free(folder: Path) -> bool:
    """Return True if writing there loses nothing: it is new or empty, or an extraction was stopped in it."""
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

    A damaged row raises `RowDamaged`, or is left out.
    """
    is_speech = packed.of_kind("audio") is not None and packed.sample_rate is not None
    names = file_names([packed.tags[row] for row in rows], ".wav" if is_speech else ".npz")
    result, checked, lines = Extraction(folder / MANIFEST), CheckedRows(packed), []
    num_left = _num_bytes(packed, rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        result.num_others = sum(len(files) for _, _, files in os.walk(folder))
        (folder / LIST).write_text(json.dumps(names), encoding="utf-8")
        for number, (row, name) in enumerate(zip(rows, names, strict=True), 1):
            if (damage := checked.damage(row)) is None:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                lines.append(_speech(packed, row, path, name) if is_speech else _arrays(packed, row, path, name))
            elif skip_bad:
                result.skipped.append(f"{packed.tags[row]}: {damage.what}")
            else:
                raise RowDamaged(damage)
            num_left -= _num_bytes(packed, range(row, row + 1))
            if progress is not None:
                progress(number)
        if not lines:
            raise InvalidData(f"{near(packed.path)}: every row is damaged", hint="pack it again from its original data")
        with replacing(result.manifest) as file:
            file.writelines(f"{line}\n" for line in map(json_text, lines))
    except OSError as error:
        raise cannot_write(folder, error, num_left, "it begins anew, in the same folder") from error
    result.num_rows = len(lines)
    return result


def _has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def _clear(folder: Path) -> None:
    """Remove what an earlier extraction has written, and nothing else."""
    if not (folder / LIST).exists():
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.glob(f".{MANIFEST}.*"):
        if is_aside(path.name):  # a kill came while the manifest was written
            path.unlink()
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
    """Return the size of these rows."""
    streams = [packed.stream(name) for name in packed.names]
    return sum(int(stream.lengths[rows.start : rows.stop].sum()) * stream.step_bytes for stream in streams)


def file_names(tags: list[str], suffix: str) -> list[str]:
    """Return a file name for each tag, similar to it, never outside of the folder, and never twice."""
    used: set[str] = set()
    names = []
    for number, tag in enumerate(tags, 1):
        parts = [part for part in PurePosixPath(tag.replace("\0", "")).parts if part not in ("/", "..", ".")]
        stem = str(PurePosixPath(*parts).with_suffix("")) if parts else f"row-{number}"
        name = f"{stem}{suffix}" if "#" not in tag else f"{stem}-{number}{suffix}"
        others = (f"{stem}-{other}{suffix}" for other in itertools.count(number))
        while name in used or name == MANIFEST:
            name = next(others)
        used.add(name)
        names.append(name)
    return names


def _speech(packed: Packed, row: int, path: Path, name: str) -> dict[str, Any]:
    import soundfile

    audio, text, seconds = packed.of_kind("audio"), packed.of_kind("text"), packed.seconds()
    assert audio is not None
    assert seconds is not None
    # In memory first: libsndfile does not name a full disk as the reason of an error.
    buffer = io.BytesIO()
    soundfile.write(buffer, np.asarray(audio.view(row)), packed.sample_rate, subtype="PCM_16", format="WAV")
    path.write_bytes(buffer.getbuffer())
    line = {"audio_filepath": name, "duration": float(seconds[row])}
    return {**line, **({} if text is None else {"text": text.text(row)}), **packed.extra(row)}


def _arrays(packed: Packed, row: int, path: Path, name: str) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    texts = {}
    for stream in map(packed.stream, packed.names):
        if stream.kind == "text":
            texts[stream.name] = stream.text(row)
        else:
            arrays[stream.name] = stream.view(row)[0] if stream.is_single else stream.view(row)
    np.savez(path, allow_pickle=False, **arrays)
    return {**packed.extra(row), "file": name, "tag": packed.tags[row], **texts}
