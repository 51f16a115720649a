"""Lhotse's cuts as lines of a manifest: `cuts.jsonl` or `cuts.jsonl.gz`.

A cut is a part of a recording, with supervisions that say what is spoken in it. A cut with one supervision is an
utterance; of a cut with several, each is an utterance of its own, as `trim_to_supervisions` makes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.recipes.speech.manifest.line import LineInvalid, resolve

KINDS = ("MonoCut", "Cut")
OTHER_KINDS = ("MixedCut", "MultiCut", "PaddingCut")


def is_cut(entry: Mapping[str, Any]) -> bool:
    """Return True for a line of Lhotse's."""
    return entry.get("type") in (*KINDS, *OTHER_KINDS) or ("recording" in entry and "supervisions" in entry)


def lines_of_cut(entry: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return lines as NeMo has them, for a cut of a manifest in `folder`."""
    kind = entry.get("type", "MonoCut")
    if kind not in KINDS:
        why = f"is a {kind}; only MonoCut is read: save the audio of such cuts first"
        raise LineInvalid(why)
    channel = entry.get("channel", 0)
    if channel not in (0, None) or isinstance(channel, bool):
        raise LineInvalid(f"is about channel {channel}; channels are averaged here, not chosen")
    begin, length = _seconds(entry, "start"), _seconds(entry, "duration")
    audio = _audio(entry.get("recording"), folder)
    supervisions = entry.get("supervisions") or []
    if not isinstance(supervisions, list) or not all(isinstance(each, dict) for each in supervisions):
        raise LineInvalid('"supervisions" must be a list of objects')
    if len(supervisions) < 2:
        about = _about(supervisions[0]) if supervisions else {}
        return [{"audio_filepath": audio, "offset": begin, "duration": length, **about}]
    parts = [(each.get("start", 0.0), _part(audio, begin, length, each)) for each in supervisions]
    return [line for _, line in sorted(parts, key=lambda part: part[0])]


def _part(audio: str, begin: float, length: float, supervision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of one of several supervisions: what of it lies within the cut."""
    start = supervision.get("start", 0.0)
    if not isinstance(start, int | float):
        raise LineInvalid('"start" of a supervision must be a number')
    first, last = max(0.0, start), min(length, start + _seconds(supervision, "duration"))
    return {"audio_filepath": audio, "offset": begin + first, "duration": last - first, **_about(supervision)}


def _about(supervision: Mapping[str, Any]) -> dict[str, Any]:
    return {key: supervision[key] for key in ("text", "speaker", "language", "id") if supervision.get(key) is not None}


def _audio(recording: Any, folder: Path) -> str:
    if not isinstance(recording, dict):
        raise LineInvalid('"recording" is missing: a cut of features alone has no audio')
    if recording.get("transforms"):
        raise LineInvalid("its recording is to be transformed: save the audio of such cuts first")
    sources = recording.get("sources")
    if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], dict):
        raise LineInvalid("its recording must have one source")
    kind, source = sources[0].get("type"), sources[0].get("source")
    if kind not in ("file", "url") or not isinstance(source, str) or not source.strip():
        # A source may also be a command of the shell, which is never executed here.
        raise LineInvalid(f"its recording is of type {kind}; only file and url are read")
    if "://" in source or os.path.isabs(source) or os.path.exists(resolve(folder, source)):
        return source
    # Lhotse writes paths as they were given to it, from the folder that it was called in.
    return os.path.abspath(source) if os.path.exists(source) else source


def _seconds(entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise LineInvalid(f'"{key}" must be a number of seconds')
    return float(value)
