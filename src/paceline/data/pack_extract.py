"""Packed data taken apart again: WAV files and a manifest where it is speech, else arrays, one file per row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from paceline.config.json_text import json_text
from paceline.config.paths import CannotWrite
from paceline.data.hdf import Packed
from paceline.data.hdf_manifest import durations

MANIFEST = "manifest.json"


def extract(packed: Packed, folder: Path, rows: range, progress: Callable[[int], None] | None = None) -> Path:
    """Write rows into a folder, beside a manifest of them; the manifest."""
    is_speech = packed.of_kind("audio") is not None and packed.sample_rate is not None
    names = file_names([packed.tags[row] for row in rows], ".wav" if is_speech else ".npz")
    lines = []
    try:
        for done, (row, name) in enumerate(zip(rows, names, strict=True), 1):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            lines.append(_speech(packed, row, path, name) if is_speech else _arrays(packed, row, path, name))
            if progress is not None:
                progress(done)
        out = folder / MANIFEST
        out.write_text("".join(f"{line}\n" for line in map(json_text, lines)), encoding="utf-8")
    except OSError as error:
        raise CannotWrite(folder, error) from error
    return out


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
    soundfile.write(path, np.asarray(audio.view(row)), packed.sample_rate, subtype="PCM_16")
    line = {"audio_filepath": name, "duration": float(durations(packed)[row])}
    return line if text is None else {**line, "text": text.text(row)}


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
    return {"file": name, "tag": packed.tags[row], **texts}
