"""JSON that can always be written: not escaped, except for file names that are no UTF-8."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """Return JSON on one line. A byte that is no text, half a surrogate pair in Python, is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_utf8(text) else json.dumps(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
