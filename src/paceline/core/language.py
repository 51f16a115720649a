"""Translation of help, messages and the report page at the moment they are rendered.

The code holds English text alone. `translate` takes an English text, filled in as it is, and returns it in the reader's
language, from a table whose keys are English templates (`words.zh.json`): a text equal to a key first, then the
template with the most literal characters that fits; its fields are translated in turn. What the table lacks stays
English. `PACELINE_LANG` names the language; without it the locale does (`LC_ALL`, `LC_MESSAGES`, `LANG`).

Journals, records, exit codes, JSON and `str(error)` are English in every language. Nothing is read in English.
"""

from __future__ import annotations

import functools
import os
import re
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from paceline.core.units import plural

VARIABLE = "PACELINE_LANG"
ENGLISH = "en"
TRANSLATED = ("zh",)
"""Languages that have a table."""
_LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
_QUOTES = ("'", '"', "`")
"""Marks of names and values, which are never translated."""
_JOINTS = re.compile(r"(: |; |, or )")
"""What joins texts that are keys of their own."""
_LEAST = 4
"""Letters of a template that is found by them; one that begins with a field needs twice as many."""
_chosen: ContextVar[str | None] = ContextVar("language", default=None)


def language_of(environment: Mapping[str, str]) -> str:
    """Return the language that an environment asks for: `PACELINE_LANG` first, then the locale."""
    words = (environment.get(name) for name in (VARIABLE, *_LOCALE))
    wanted = next(filter(None, words), ENGLISH).lower()
    return next((name for name in TRANSLATED if wanted.startswith(name)), ENGLISH)


def language() -> str:
    """Return the language of this process and context."""
    return _chosen.get() or language_of(os.environ)


@contextmanager
def speaking(name: str) -> Iterator[None]:
    """Use a language in this context, whatever the environment says."""
    before = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(before)


def translate(text: str, template: str = "") -> str:
    """Return an English text in the reader's language; `template` is the one it was filled in from, if known."""
    spoken = language()
    if spoken == ENGLISH or not text:
        return text
    own = _by_english(spoken).get(template)
    return (own and own.fill(text, spoken)) or _translated(text, spoken)


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
    words: dict[str, dict[str, str]] = json.loads(text)
    return words


@dataclass(frozen=True)
class _Template:
    """An entry of the table."""

    english: str
    translation: str

    @functools.cached_property
    def parts(self) -> list[_Part]:
        return _parsed(self.english)

    @functools.cached_property
    def longest(self) -> str:
        """The longest text without a field, which every text that fits has."""
        return max((part[0] for part in self.parts), key=len)

    @functools.cached_property
    def weight(self) -> int:
        """Number of letters that a text must have to fit, those of nouns included; less two for fields side by side."""
        fixed = [text for literal, _, spec, _ in self.parts for text in (literal, spec if _is_noun(spec) else "")]
        num_joined = sum(literal.isspace() and name is not None for literal, name, *_ in self.parts)
        return sum(letter.isalpha() for letter in "".join(map(str, fixed))) - 2 * num_joined

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        groups: dict[str, str] = {}
        pattern = ""
        for literal, name, spec, how in self.parts:
            pattern += re.escape(literal)
            if name is None:
                continue
            key = _key(name, spec, how)
            if key in groups:
                pattern += f"(?P={groups[key]})"
                continue
            groups[key] = f"f{len(groups)}"
            inner = ".*?"
            if spec and _is_noun(spec):
                inner = f"-?[0-9,]+ (?:{re.escape(plural(2, spec[1:]))}|{re.escape(spec[1:])})"
            pattern += f"(?P<{groups[key]}>{inner})"
        return re.compile(pattern, re.DOTALL)

    def joins(self, text: str) -> bool:
        """Return True if the first field of the template would hold `where: ` of a text, which is not part of it."""
        where, joint, _ = text.partition(": ")
        return bool(joint) and not self.parts[0][0] and self.longest not in where + joint

    def fill(self, text: str, spoken: str) -> str | None:
        """Return the translation of a text that fits the English template; None if it does not fit."""
        found = self.pattern.fullmatch(text)
        if found is None:
            return None
        values: dict[str, str] = {}
        by_name: dict[str, str] = {}
        groups = iter(found.groups())
        for literal, name, spec, how in self.parts:
            key = "" if name is None else _key(name, spec, how)
            if name is None or key in values:
                continue
            value = next(groups)
            if not how and not _is_noun(spec) and not literal.endswith(_QUOTES):
                value = _translated(value, spoken, is_field=True)
            values[key] = value
            by_name.setdefault(name, value.partition(" ")[0] if _is_noun(spec) else value)
        return "".join(
            literal + ("" if name is None else values.get(_key(name, spec, how), by_name[name]))
            for literal, name, spec, how in _parsed(self.translation)
        )


_Part = tuple[str, "str | None", "str | None", "str | None"]
"""Text before a field, and the field's name, format and conversion."""


def _parsed(template: str) -> list[_Part]:
    """Return the parts of a template; a text with a brace that opens no field is one part."""
    try:
        return list(string.Formatter().parse(template)) or [("", None, None, None)]
    except ValueError:
        return [(template, None, None, None)]


def _is_noun(spec: str | None) -> bool:
    return bool(spec) and str(spec).startswith("#")


def _key(name: str, spec: str | None, how: str | None) -> str:
    """Return what tells fields of one name apart: `'a'` and `a`, `2 ranks` and `2`."""
    return f"{name}!{how}" if how else f"{name}:#" if _is_noun(spec) else name


@functools.lru_cache(maxsize=4096)
def _translated(text: str, spoken: str, is_field: bool = False) -> str:
    if not text or (is_field and " " not in text and text not in _FIELD_WORDS):
        return text  # a name or a number
    exact = _by_english(spoken).get(text)
    if exact is not None:
        return exact.translation
    inner = text.strip()
    if inner != text:
        before, after = text.split(inner, 1) if inner else (text, "")
        return before + _translated(inner, spoken) + after
    lines = text.split("\n")
    for template in _with_fields(spoken):
        # Fields hold several lines only where the template itself has several.
        if template.longest in text and (len(lines) == 1 or "\n" in template.english):
            filled = None if template.joins(text) else template.fill(text, spoken)
            if filled is not None:
                return filled
    if len(lines) > 1:
        return "\n".join(_translated(line, spoken) for line in lines)
    joint = _JOINTS.search(text)
    if joint is None:
        return text
    parts = text[: joint.start()], text[joint.end() :]
    head, tail = (_translated(part, spoken, is_field=True) for part in parts)
    if (head, tail) == parts:
        return text
    return head + table(spoken).get(joint[0], joint[0]) + tail


_FIELD_WORDS = frozenset({"text", "none", "nothing", "it", "them", "settings"})
"""Single words that messages have as a field; other single words are names that a user gave."""


@functools.cache
def _by_english(name: str) -> Mapping[str, _Template]:
    return {english: _Template(english, text) for kind in words_of(name).values() for english, text in kind.items()}


@functools.cache
def _with_fields(name: str) -> tuple[_Template, ...]:
    """Return the templates that are found by their words, those with most letters first."""
    templates = [
        each
        for each in (_Template(of.english.strip(), of.translation.strip()) for of in _by_english(name).values())
        if "{" in each.english and each.weight >= (_LEAST if each.parts[0][0] else 2 * _LEAST)
    ]
    return tuple(sorted(templates, key=lambda each: -each.weight))


@functools.cache
def table(name: str) -> Mapping[str, str]:
    """Return the table of a language: English text or template, and translation."""
    return {each.english: each.translation for each in _by_english(name).values()}
