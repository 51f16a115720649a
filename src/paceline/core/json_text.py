"""JSON that can always be written: readable letters, but for names of files that are no UTF-8."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """On one line. Python stands a half of a surrogate pair for a byte that is no text; escaped, it survives a file."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_utf8(text) else json.dumps(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
