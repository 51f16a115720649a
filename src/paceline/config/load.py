"""Settings from defaults, YAML files and the command line; later ones win.

All mistakes are collected before any is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from paceline.config import messages as wording
from paceline.config.command_line import asks_for_help, read_words
from paceline.config.parse import Given, convert
from paceline.config.problems import WORDS, Problem, SettingsInvalid
from paceline.config.sections import parts
from paceline.config.settings import Section
from paceline.config.yaml_file import read_file

S = TypeVar("S", bound=Section)


def load(model: type[S], words: Sequence[str], *, prog: str, positional: Sequence[str] = ()) -> S:
    """Return the settings of `words` and of the files that they name; `--help` shows the options and leaves.

    `positional` names the fields that are given without an option name, in order; a tuple takes all that are left.
    """
    if asks_for_help(words):
        from paceline.config.help import show_help

        show_help(model, prog=prog, positional=positional)
    typed = read_words(model, words, positional)
    given: dict[str, Given] = {}
    problems: list[Problem] = []
    is_whole = True  # what a file that cannot be read would have set is not known
    for number, file in enumerate(typed.files):
        from_file, mistakes = read_file(model, file, positional, number)
        given |= from_file
        problems += mistakes
        is_whole = is_whole and (bool(from_file) or not mistakes)
    given |= typed.given
    problems += typed.problems
    settings, mistakes = _check(model, given, tried={problem.meant for problem in problems if problem.meant})
    problems += [problem for problem in mistakes if is_whole or not problem.is_missing]
    if problems or settings is None:
        raise SettingsInvalid(sorted(problems, key=lambda problem: problem.place), prog)
    return settings


def as_yaml(settings: Section) -> str:
    """Return settings as a file for `--config`, with a comment per section."""
    values = settings.model_dump(mode="json")
    blocks = []
    for part in parts(type(settings)):
        chosen = {option.name: values[option.name] for option in part.options}
        blocks.append(f"# {part.about}\n{yaml.safe_dump(chosen, sort_keys=False, width=120, allow_unicode=True)}")
    return "\n".join(blocks)


def _check(model: type[S], given: Mapping[str, Given], tried: set[str]) -> tuple[S | None, list[Problem]]:
    values = {
        name: convert(model.model_fields[name].annotation, entry.raw, is_typed=entry.place[0] == WORDS)
        for name, entry in given.items()
    }
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        by_field = wording.problems(error, model, given)
        wrong = {*by_field, *tried}
        return None, [*by_field.values(), *_across(model, values, given, wrong, error)]


def _across(
    model: type[S], values: Mapping[str, Any], given: Mapping[str, Given], wrong: set[str], error: ValidationError
) -> list[Problem]:
    """Return contradictions between fields; the model checks these only when each field is right by itself."""
    missing = {
        str(detail["loc"][0]): "?"
        for detail in error.errors()
        if detail["type"] == "missing" and len(detail["loc"]) == 1
    }
    right = {name: value for name, value in values.items() if name not in wrong}
    try:
        model.model_validate({**right, **missing})
    except ValidationError as rest:
        return wording.across(rest, model, given, wrong)
    return []
