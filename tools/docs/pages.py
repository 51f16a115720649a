"""Pages that are written from the code, in both languages.

A generator says its words through `text`; the Chinese page has the anchors of the English one behind its headings, and
its digest in the first line. Words of pages and docstrings are in `docs/zh/words.json`, English text and translation;
words that the program says, too (options, reasons), are in its own table (`core/words.zh.json`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from paceline.core.language import ENGLISH, language, speaking, table
from tools.docs import translate

DOCS = Path(__file__).parents[2] / "docs"
asked: set[str] = set()
"""Texts that a page in Chinese was asked for, for `tools/docs/words.py`."""


def text(english: str) -> str:
    """Return a text of a page in the language of the page."""
    if language() == ENGLISH or not english.strip():
        return english
    own = _table()
    if english in own:
        asked.add(english)
        return own[english]
    translation = table(language()).get(english, english)
    if translation == english:
        asked.add(english)
    return translation


def in_chinese(name: str, page: Callable[[], str]) -> str:
    """Return the twin of a written page: `page` said in Chinese, with the anchors and the digest of the English one."""
    english = page()
    with speaking("zh"):
        chinese = page()
    anchors = [section.anchor for section in translate.read(english, f"docs/{name}.md")][1:]
    lines = chinese.split("\n")
    heads = [section.line for section in translate.read(chinese, f"docs/zh/{name}.md")][1:]
    for line, anchor in zip(heads, anchors, strict=True):
        lines[line - 1] += f" {{ #{anchor} }}"
    return "\n".join([f"<!-- source: docs/{name}.md sha256:{translate.digest(english)} -->", *lines])


def write(name: str, page: Callable[[], str]) -> None:
    """Write a page in both languages."""
    (DOCS / f"{name}.md").write_text(page(), encoding="utf-8")
    (DOCS / "zh" / f"{name}.md").write_text(in_chinese(name, page), encoding="utf-8")


@functools.cache
def _table() -> dict[str, str]:
    table: dict[str, str] = json.loads((DOCS / "zh" / "words.json").read_text(encoding="utf-8"))
    return table
