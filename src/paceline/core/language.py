"""Language of what people read: help, messages and the report page, in English or by a table of words.

The words are written in English in the code; `said` returns them in the reader's language, or as they are where the
table has no entry. `PACELINE_LANG` says which language; without it the locale does (`LC_ALL`, `LC_MESSAGES`, `LANG`).
A table, `words.zh.json`, has the English text as key, so a text that was changed is missing until it is translated
again; `docs/words.py` lists what is missing and what is no longer said. Nothing is read while the language is English.

Journals, records, exit codes and JSON are the same in every language.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from paceline.core.units import worded

if TYPE_CHECKING:  # which takes longer to import than all else here
    from typing_extensions import Self

VARIABLE = "PACELINE_LANG"
ENGLISH = "en"
TRANSLATED = ("zh",)
"""Languages that have a table."""
_LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
_chosen: ContextVar[str | None] = ContextVar("language", default=None)


def language_of(environment: Mapping[str, str]) -> str:
    """Return the language that an environment asks for: `PACELINE_LANG` first, then the locale."""
    words = (environment.get(name) for name in (VARIABLE, *_LOCALE))
    wanted = next(filter(None, words), ENGLISH).lower()
    return next((name for name in TRANSLATED if wanted.startswith(name)), ENGLISH)


def language() -> str:
    """Return the language that is spoken here and now."""
    return _chosen.get() or language_of(os.environ)


@contextmanager
def speaking(name: str) -> Iterator[None]:
    """Speak a language for a while, whatever the environment says."""
    before = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(before)


def said(text: str) -> str:
    """Return a text, or the template of one, in the reader's language."""
    spoken = language()
    return text if spoken == ENGLISH else _table(spoken).get(text, text)


class Phrase(str):
    """Part of a message: English as a string; filled into a template, in the language that is spoken there."""

    _template: str
    _values: Mapping[str, Any]

    def __new__(cls, template: str, values: Mapping[str, Any]) -> Self:
        with speaking(ENGLISH):
            phrase = super().__new__(cls, worded(template, values))
        phrase._template, phrase._values = template, values
        return phrase

    def __format__(self, format_spec: str) -> str:
        return format(worded(said(self._template), self._values), format_spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the English words: values may be of any kind."""
        return str, (str(self),)


def phrase(template: str, /, **values: Any) -> str:
    """Return a part of a message, for a field of an error; it is said in the reader's language when the error is."""
    return Phrase(template, values)


def can_be_written(text: str, *encodings: str | None) -> bool:
    """Return True if a text has a form in these encodings: Chinese has none in that of a Latin locale."""
    try:
        return all(text.encode(name or "utf-8") for name in encodings)
    except UnicodeEncodeError:
        return False


def words_of(name: str) -> dict[str, dict[str, str]]:
    """Read the table of a language: by kind of text, English and translation."""
    import json
    from importlib import resources

    text = resources.files(__package__).joinpath(f"words.{name}.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, str]] = json.loads(text)
    return table


@functools.cache
def _table(name: str) -> dict[str, str]:
    return {english: text for kind in words_of(name).values() for english, text in kind.items()}
