"""JSON that can always be written, not escaped except for file names that are no UTF-8, and read without surprise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core import bounded_file


def json_text(value: Any) -> str:
    """Return JSON on one line. A byte that is no text, half a surrogate pair in Python, is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_utf8(text) else json.dumps(value)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; every text that has none raises `ValueError`, however deep it is nested."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, max_bytes: int = 64 * 10**6) -> Any:
    """Return the value of a JSON file that others may have written; raises `ValueError`, or `OSError`."""
    return parse_json(bounded_file.read_bytes(path, max_bytes))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
