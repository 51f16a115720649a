"""Collects every text that is said in the reader's language, and compares it with the tables of translations.

    python docs/words.py            lists, for each language, texts without a translation and translations of no text
    python docs/words.py --write    puts the table of each language into the order of the code, without what is stale

The table that is shipped is `src/paceline/core/words.zh.json`: help, messages, the report page, reasons of
docs/together.md. Docstrings and the sentences of written pages are in `docs/zh/words.json`, which only `make docs`
needs. The key of an entry is the English text, so a text that was changed has no translation until it gets one.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

import paceline
from paceline.cli.completion import options_of
from paceline.cli.main import COMMANDS
from paceline.config import help as help_texts
from paceline.config import messages
from paceline.config.sections import docs
from paceline.config.settings import Section, TrainConfig, exclusions_of
from paceline.core.errors import PacelineError
from paceline.core.language import TRANSLATED, words_of
from paceline.observe.report.curves import NOTES
from paceline.observe.report.figure import PHASE_COLORS
from paceline.observe.report.runs import STANDINGS
from paceline.observe.report.times import NUMBERS
from paceline.recipes.speech.commands.manifest import ACTIONS
from paceline.train.autotune.limits import GRAPHS, KERNELS
from paceline.train.find_task import find_task, recipe_names

SOURCE = Path(paceline.__file__).parent
Texts = dict[str, list[str]]
"""Texts by kind, in the order of the code."""


def texts() -> Texts:
    """Return every text that the shipped table may have, by kind."""
    import_all()
    said, of_report = _literals()
    return {
        "commands": [*COMMANDS.values(), *ACTIONS.values()],
        "options": _unique([help_texts.CONFIG_OPTION.about, *_options()]),
        "sections": _unique(_sections()),
        "errors": _unique(_errors()),
        "messages": _unique([*messages.TEXTS, *said]),
        "together": _unique(_together()),
        "report": _unique([*_of_report(), *of_report]),
    }


def _unique(found: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(found) if has_words(text)]


def has_words(template: str) -> bool:
    """Return True if a template is more than its fields; otherwise it needs no translation."""
    return any(letter.isalpha() for literal, *_ in string.Formatter().parse(template) for letter in literal)


def import_all() -> None:
    """Import every module, so that all errors and sections are known."""
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def subclasses(kind: type) -> Iterator[type]:
    """Yield the classes below one, of this package alone, in the order of their modules and lines."""

    def below(one: type) -> Iterator[type]:
        for each in one.__subclasses__():
            yield each
            yield from below(each)

    ours = {
        each for each in below(kind) if each.__module__.startswith("paceline.") and "<locals>" not in each.__qualname__
    }
    return iter(sorted(ours, key=lambda each: (each.__module__, _line(each), each.__qualname__)))


def _line(kind: type) -> int:
    try:
        return inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):  # made at run time
        return -1


def _models() -> list[type]:
    return [each for each in subclasses(BaseModel) if _line(each) >= 0 and issubclass(each, Section)]


def _options() -> Iterator[str]:
    for model in _models():
        yield from docs(model).values()


def _sections() -> Iterator[str]:
    commands = [options_of(name)[0] for name in COMMANDS]  # made at run time, with a sentence of their own
    for model in [*_models(), *commands]:
        text = inspect.cleandoc(model.__doc__ or "")
        if text:
            yield text.splitlines()[0]
            yield " ".join(text.split())


def _errors() -> Iterator[str]:
    for error in subclasses(PacelineError):
        for name in ("sentence", "hint"):
            text = vars(error).get(name)
            if isinstance(text, str) and text:
                yield text


def _literals() -> tuple[list[str], list[str]]:
    """Return the texts in calls of `said`, `phrase` and `Problem`: all others, and those of reports."""
    others: list[str] = []
    of_reports: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        is_report = name.startswith("observe/report/") or name.endswith("/report.py")
        (of_reports if is_report else others).extend(_in_file(path))
    return others, of_reports


def _in_file(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        places: Sequence[ast.expr] = {"said": node.args[:1], "phrase": node.args[:1], "Problem": node.args[1:3]}.get(
            node.func.id, []
        )
        for place in places:
            for each in (place.body, place.orelse) if isinstance(place, ast.IfExp) else (place,):
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value:
                    yield each.value


def _of_report() -> Iterator[str]:
    """Yield titles and texts that the report page takes from tables; its other ones stand in calls of `said`."""
    yield from STANDINGS.values()
    yield from PHASE_COLORS
    for title, about in NOTES.values():
        yield from (title, about)
    for number in NUMBERS.values():
        yield from (number.title, number.about, number.unit)
    yield from _FIGURES


_FIGURES = (
    *("Summary", "What held it back", "What held them back", "Learning", "Samples", "Time and speed", "Settings"),
    *(
        "Word errors",
        "Continual learning",
        "Settings that differ",
        "Starts",
        "samples",
        "utterances",
        "tokens",
        "images",
    ),
    *("Throughput", "Training loss", "Ranks", "step", "epoch", "loss", "ranks", "samples/s", "% of the rank's time"),
    *("% of words", "substitutions", "deletions", "insertions", "reference", "hypothesis"),
    *("class-IL accuracy", "task-IL accuracy", "command", "started", "starts", "host", "git commit"),
    "uncommitted changes",
    "Samples of all ranks per second, since the point before; without validation and checkpoints.",
    "Ranks that train, from each change on: a rank was lost, or one has joined.",
    "Over all epochs. The rank that waits least for the others (communication) is the one they wait for.",
    "Wrong, missing and added words, of the words that were said; their sum is the word error rate.",
    "How much of each task (column) is known after each (row). Empty: not measured.",
)
"""Titles and texts that are said where they are shown."""


def _together() -> Iterator[str]:
    sections = [TrainConfig, *(find_task(name).Settings for name in recipe_names())]
    entries = [each for section in sections for each in exclusions_of(section)]
    yield from (each.problem for each in entries)
    of_errors = [each for error in subclasses(PacelineError) for each in getattr(error, "excludes", ())]
    for each in [*entries, *of_errors]:
        yield from (each.first, each.second, each.kind, each.reason)
    for limit in (*KERNELS, *GRAPHS):
        yield from (limit.beside, limit.reason)


# -- comparing with the tables -----------------------------------------------------------------------------------------


def missing(wanted: Texts, table: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return (kind, text) of every text that has no translation."""
    known = {text for kind in table.values() for text in kind}
    return [(kind, text) for kind, entries in wanted.items() for text in entries if text not in known]


def stale(wanted: Texts, table: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return (kind, text) of every translation of a text that is said no more."""
    known = {text for entries in wanted.values() for text in entries}
    return [(kind, text) for kind, entries in table.items() for text in entries if text not in known]


def misfits(table: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return (kind, text) of every translation that has other fields, inline code or numbers than the text."""
    return [
        (kind, text)
        for kind, entries in table.items()
        for text, translation in entries.items()
        if _fixed(text) != _fixed(translation)
    ]


def _fixed(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return what a translation must have, too: fields, inline code, numbers."""
    code = re.compile(r"`[^`]*`")
    outside = re.sub(r"\{[^{}]*\}", "", code.sub("", text))
    return fields(text), sorted(code.findall(text)), sorted(re.findall(r"\d+(?:[.,]\d+)*", outside))


def fields(template: str) -> list[str]:
    """Return the fields of a template, in the order of their names; `{ranks:#rank}` may be `{ranks}` elsewhere."""
    try:
        return sorted(
            f"{name}!{how or ''}" for _, name, _, how in string.Formatter().parse(template) if name is not None
        )
    except ValueError:  # a text with a brace, which is never filled in
        return []


def ordered(wanted: Texts, table: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return a table in the order of the code, without what is stale; a text of two kinds is in the first."""
    known = {text: translation for entries in table.values() for text, translation in entries.items()}
    result: dict[str, dict[str, str]] = {}
    for kind, entries in wanted.items():
        before = {text for each in result.values() for text in each}
        result[kind] = {text: known[text] for text in entries if text in known and text not in before}
    return result


def main(words: Sequence[str]) -> int:
    wanted = texts()
    code = 0
    for name in TRANSLATED:
        table = words_of(name)
        if "--write" in words:
            table = ordered(wanted, table)
            content = json.dumps(table, ensure_ascii=False, indent=0) + "\n"
            (SOURCE / "core" / f"words.{name}.json").write_text(content, encoding="utf-8")
        lists = {
            "no translation": missing(wanted, table),
            "said no more": stale(wanted, table),
            "other fields, code or numbers": misfits(table),
        }
        for what, entries in lists.items():
            for kind, text in entries:
                print(f"{name}: {what}: {kind}: {text!r}")
        total = sum(map(len, wanted.values()))
        print(f"{name}: {total - len(lists['no translation'])} of {total} texts have a translation")
        code = max(code, int(any(lists.values())))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
