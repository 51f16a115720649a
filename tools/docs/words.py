"""Compares the texts of the code with the tables of translations.

    python -m tools.docs.words            lists texts without a translation and translations of no text, by language
    python -m tools.docs.words --write    takes translations of no text out of the table of each language

The table that is shipped is `src/paceline/core/words.zh.json`: help, messages, the report page, reasons of
docs/together.md. Docstrings and the sentences of written pages are in `docs/zh/words.json`, which only `make docs`
needs. The key of an entry is the English template, so a text that was changed has no translation until it gets one.
The names of fields do not count: `{folder} is not a run` is the key of `f"{self.path} is not a run"`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import paceline
from paceline.cli.completion import options_of
from paceline.cli.main import command_names
from paceline.config.sections import parts
from paceline.core.errors import PacelineError
from paceline.core.language import TRANSLATED, words_of

SOURCE = Path(paceline.__file__).parent
Table = Mapping[str, Mapping[str, str]]
"""By kind of text, English and translation."""
SHOWN = {
    *("translate", "said", "phrase", "Problem", "Exclusion", "SettingsExclusion"),
    *(kind.__name__ for kind in PacelineError.__subclasses__() if not kind.sentence),
}
"""Calls whose texts are shown to users."""
NAMES = ("sentence", "hint")
"""Assignments and arguments whose texts are shown to users."""

UNITS = {"images"}
"""Units that tasks of users count samples in."""


def of_help() -> Iterator[str]:
    """Yield every text of `--help`."""
    for name in command_names():
        model = options_of(name)[0]
        yield " ".join(inspect.cleandoc(model.__doc__ or "").split())
        for part in parts(model):
            yield part.about
            yield from (option.about for option in part.options)


def of_messages() -> Iterator[str]:
    """Yield every template of an error, a hint, a summary or a report, as far as the code tells."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHOWN:
                yield from map(template, [*node.args, *(each.value for each in node.keywords)])
            elif isinstance(node, ast.keyword | ast.Assign):
                name = node.arg if isinstance(node, ast.keyword) else getattr(node.targets[0], "id", "")
                if name in NAMES:
                    yield template(node.value)


def of_code() -> set[str]:
    """Return every text of the code, as it is and without the names of its fields, and first lines of docstrings."""
    texts = {template(node) for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.expr)}
    lines = {text.strip().partition("\n")[0] for text in texts}
    of_errors = {str(vars(error).get(name, "")) for error in errors() for name in NAMES}
    every = texts | lines | of_errors | UNITS
    return {*every, *map(skeleton, every)}


def errors() -> Iterator[type[PacelineError]]:
    """Yield every class of error, whose texts may have constants in them."""
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    below = [PacelineError]
    while below:
        yield below[-1]
        below += below.pop().__subclasses__()


def trees() -> Iterator[ast.Module]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def template(node: ast.expr) -> str:
    """Return a string or an f-string of the code as a template; empty if it is another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        values = (each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
        return "".join(map(str, values))
    return ""


def skeleton(text: str) -> str:
    """Return a template without the names and formats of its fields, its spaces as one each."""
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError:  # a text with a brace, which is never filled in
        parsed = [(text, None, None, None)]
    return " ".join("".join(literal + ("" if name is None else "{}") for literal, name, *_ in parsed).split())


def has_words(text: str) -> bool:
    """Return True if a template has a word outside of fields and inline code, which is to be translated."""
    return bool(re.search(r"[A-Za-z]{2}", re.sub(r"`[^`]*`", "", skeleton(text))))


def missing(wanted: Iterator[str] | Sequence[str], table: Table) -> list[str]:
    """Return the texts that have no translation."""
    known = {skeleton(text) for kind in table.values() for text in kind}
    return list(dict.fromkeys(text for text in wanted if has_words(text) and skeleton(text) not in known))


def stale(texts: set[str], table: Table) -> list[str]:
    """Return the keys of a table that are not among the texts of the code, or in one of them."""
    unlike = [text for kind in table.values() for text in kind if skeleton(text) not in texts]
    return [text for text in unlike if not any(map(pattern(text).search, texts))]


def pattern(text: str) -> re.Pattern[str]:
    """Return a pattern of texts that a template may be filled in as."""
    parsed = string.Formatter().parse(text)
    return re.compile("".join(re.escape(literal) + ("" if name is None else ".*") for literal, name, *_ in parsed))


def misfits(table: Table) -> list[str]:
    """Return the keys whose translation has other fields, inline code or numbers."""
    return [text for kind in table.values() for text, words in kind.items() if _fixed(text) != _fixed(words)]


def _fixed(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return what a translation must have, too: fields, inline code, numbers."""
    code = re.compile(r"`[^`]*`")
    outside = re.sub(r"\{[^{}]*\}", "", code.sub("", text))
    return _fields(text), sorted(code.findall(text)), sorted(re.findall(r"\d+(?:[.,]\d+)*", outside))


def _fields(text: str) -> list[str]:
    """Return the fields of a template, in the order of their names; `{ranks:#rank}` may be `{ranks}` elsewhere."""
    try:
        return sorted(f"{name}!{how or ''}" for _, name, _, how in string.Formatter().parse(text) if name is not None)
    except ValueError:
        return []


def main(words: Sequence[str]) -> int:
    code, texts = 0, of_code()
    for language in TRANSLATED:
        table = words_of(language)
        if "--write" in words:
            gone = {*stale(texts, table)}
            table = {kind: {each: kept[each] for each in kept if each not in gone} for kind, kept in table.items()}
            content = json.dumps(table, ensure_ascii=False, indent=0) + "\n"
            (SOURCE / "core" / f"words.{language}.json").write_text(content, encoding="utf-8")
        lists = {
            "help without a translation": missing(of_help(), table),
            "message without a translation": missing(of_messages(), table),
            "text that the code lacks": stale(texts, table),
            "other fields, code or numbers": misfits(table),
        }
        for what, entries in lists.items():
            print(*(f"{language}: {what}: {text!r}" for text in entries), sep="\n")
            code |= bool(entries)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
