"""Hook of mkdocs: a page's title is its heading, also where a comment stands above that."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page without the comments at its beginning: `source: ...`, `Written by ...`."""
    return re.sub(r"\A(\s*<!--.*?-->\s*)+", "", markdown, flags=re.DOTALL)
