"""Parser of one line of a manifest: NeMo's JSON, or the reason why it is invalid."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from paceline.core.cloud.address import local_path
from paceline.core.cloud.file_copy import bring_missing

BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, which some editors write at the beginning of a file."""
AUDIO_KEYS = ("audio_filepath", "audio_filename")
MOST_SECONDS = 1e7
"""Nearly four months; a larger number is no length in seconds."""
_NAN = float("nan")
_CUT = "EOF while parsing"
"""Words of the JSON parser for a text that ends too early."""
_ESCAPED_BYTE = re.compile(rb"\\udc[89a-f][0-9a-f]", re.IGNORECASE)
"""Python's notation for a byte of a file name that is not UTF-8."""


class Line(NamedTuple):
    """An utterance as written in its line; strings in UTF-8, the path not yet resolved."""

    audio: bytes
    seconds: float
    text: bytes
    offset: float
    """NaN if the line has none: it is then about the whole file."""


class LineInvalid(Exception):
    """A line that cannot be used, and why."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why  # as it was given: a phrase is said in the reader's language


def parse_line(raw: bytes, folder: Path, needs_text: bool = True) -> Line:
    """Parse a line that is not blank; `folder` is that of the manifest."""
    return line_of(parse_object(raw), folder, needs_text)


def line_of(entry: dict[str, Any], folder: Path, needs_text: bool = True) -> Line:
    """Return the utterance that a JSON object describes."""
    seconds = entry.get("duration")
    text = entry.get("text")
    if type(seconds) is not float or not 0.0 < seconds <= MOST_SECONDS:
        seconds = _seconds(entry, "duration")
        if seconds == 0.0:
            raise LineInvalid('"duration" is 0, and must be above')
    if type(text) is not str:
        text = _text(entry, folder) if needs_text else ""
    audio = _bytes(audio_of(entry), AUDIO_KEYS[0], "surrogateescape")
    return Line(audio, seconds, _bytes(text, "text"), offset_of(entry))


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a line."""
    try:
        entry = from_json(raw)
    except ValueError as error:
        entry = _with_bytes(raw)
        if entry is None:
            raise LineInvalid(_why_not_json(raw)) from error
    if type(entry) is not dict:
        raise LineInvalid(f"is {_kind(entry)}, not a JSON object")
    return entry


def audio_of(entry: dict[str, Any]) -> str:
    """Return the path of an utterance's audio, as it is written."""
    key = AUDIO_KEYS[0] if entry.get(AUDIO_KEYS[0]) is not None or AUDIO_KEYS[1] not in entry else AUDIO_KEYS[1]
    audio = _present(entry, key)
    if type(audio) is not str:
        raise LineInvalid(f'"{key}" must be text, not {_kind(audio)}')
    if not audio.strip():
        raise LineInvalid(f'"{key}" is empty')
    if "\0" in audio:
        raise LineInvalid(f'"{key}" is no path: {audio!r}')
    return audio


def offset_of(entry: dict[str, Any]) -> float:
    """Return where in its file an utterance begins, in seconds; NaN if its line does not say."""
    return _NAN if entry.get("offset") is None else _seconds(entry, "offset")


def resolve(folder: Path, written: str) -> Path:
    """Return the file that a path in a manifest of `folder` names."""
    return local_path(written) if "://" in written else folder / os.path.expanduser(written)


def _with_bytes(raw: bytes) -> Any:
    """Parse a line that names a file by bytes that are not UTF-8, as `json_text` writes it, else return None."""
    try:
        return json.loads(raw) if _ESCAPED_BYTE.search(raw) else None
    except (ValueError, RecursionError):
        return None


def _bytes(text: str, key: str, errors: str = "strict") -> bytes:
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError:
        raise LineInvalid(f'"{key}" holds a half of a surrogate pair, which is no character') from None


def _seconds(entry: dict[str, Any], key: str) -> float:
    value = _present(entry, key)
    if type(value) is not float and type(value) is not int:
        raise LineInvalid(f'"{key}" must be a number, not {_kind(value)}')
    if value < 0:
        raise LineInvalid(f'"{key}" is {_short(value)}, and must not be below 0')
    if not value <= MOST_SECONDS:  # also NaN
        raise LineInvalid(f'"{key}" is {_short(value)}, which is no number of seconds')
    return float(value)


def _text(entry: dict[str, Any], folder: Path) -> str:
    if entry.get("text") is not None:
        raise LineInvalid(f'"text" must be text, not {_kind(entry["text"])}')
    if entry.get("text_filepath") is None:
        _present(entry, "text")
    written = entry["text_filepath"]
    if type(written) is not str or "\0" in written:
        raise LineInvalid(f'"text_filepath" must be a path, not {_kind(written)}')
    path = resolve(folder, written)
    try:
        if not path.is_file() and not bring_missing(path):  # also a device or a pipe, which could be read without end
            raise LineInvalid(f'"text_filepath": there is no file {path}')
        return path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise LineInvalid(f'"text_filepath": {path} is not UTF-8') from None
    except OSError as error:
        why = f'"text_filepath": {path} cannot be read: {error.strerror}'
        raise LineInvalid(why) from None


def _present(entry: dict[str, Any], key: str) -> Any:
    value = entry.get(key)
    if value is None:
        raise LineInvalid(f'"{key}" is null' if key in entry else f'"{key}" is missing')
    return value


def _short(value: float) -> str:
    """Return the digits of a number, cut: an integer may be too large to become a float."""
    digits = str(value)
    return digits if len(digits) <= 20 else f"{digits[:12]}..."


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _why_not_json(raw: bytes) -> str:
    """Return the reason, with positions in the line alone, without the line break behind it."""
    try:
        raw.decode("utf-8")
        from_json(raw.strip())
    except UnicodeDecodeError as error:
        return f"is not UTF-8 at byte {error.start + 1}"
    except ValueError as error:
        why = re.sub(r" at line \d+ column", " at column", str(error))
        why = re.sub(r"^expected ident", "expected value", why)  # a word like `nothing`, which begins as `null` does
        if why.startswith(_CUT):
            return f"is not JSON: the line ends within {why.removeprefix(_CUT).strip()}"
        return f"is not JSON: {why}"
    return "is not JSON"
