"""Pydantic's validation errors as problems that name the option, the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from paceline.config.command_line import dashed
from paceline.config.parse import Given, item, length, section, sequence
from paceline.config.plugin_name import NO_SUCH_PLUGIN, all_choices, group_of
from paceline.config.problems import Problem, nearest
from paceline.core import plugins
from paceline.core.errors import PacelineError
from paceline.core.units import worded

_LIMITS = {
    "greater_than": ("above {limit}", "gt"),
    "greater_than_equal": ("at least {limit}", "ge"),
    "less_than": ("below {limit}", "lt"),
    "less_than_equal": ("at most {limit}", "le"),
}
_PLUGIN_HINTS = {
    True: "more of them come with plugins: docs/plugins.md; `paceline doctor` lists those that are installed",
    False: "plugins are left out (`--no-plugins`)",
}
"""For a name that neither we nor a plugin know, by whether plugins are looked for."""
_EXAMPLES = {
    "task": "name it first: a recipe, as `paceline train digits ...`, or a class, as `my_task.py:MyTask`",
    "run": "give the folder of a run; `paceline runs` lists them",
}
"""For a positional word that is missing."""
_KINDS = (
    (r"int_|.*int$", "a whole number"),
    (r"float_|decimal_", "a number"),
    (r"finite_", "a finite number"),
    (r"bool_", "true or false"),
    (r"string_type", "text"),
    (r"path_", "a path"),
    (r"(tuple|list)_type", "a list"),
    (r"dict_type", "a mapping"),
    (r"none_required", "none"),
)

TEXTS = (
    *(word for word, _ in _LIMITS.values()),
    *_PLUGIN_HINTS.values(),
    *_EXAMPLES.values(),
    *(phrase for _, phrase in _KINDS),
)
"""Texts of these tables, for translation."""


def problems(error: ValidationError, model: type[BaseModel], given: Mapping[str, Given]) -> dict[str, Problem]:
    """Return one problem per wrong field."""
    by_field: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        if detail["loc"]:
            by_field.setdefault(str(detail["loc"][0]), []).append(detail)
    wrong = {name: _problem(name, details, model, given.get(name)) for name, details in by_field.items()}
    return {name: replace(each, place=given[name].place) if name in given else each for name, each in wrong.items()}


def across(
    error: ValidationError, model: type[BaseModel], given: Mapping[str, Given], wrong: set[str]
) -> list[Problem]:
    """Return the contradictions between fields, without those that involve a field that is `wrong` by itself."""
    contradictions = []
    lines = [
        line
        for detail in error.errors(include_url=False)
        if not detail["loc"]
        for line in _own_words(detail).splitlines()
    ]
    for text in lines:
        named = [name for name in re.findall(r"`(\w+)`", text) if name in model.model_fields]
        if wrong & set(named):
            continue
        places = [f"{given[name].where} {given[name].text}".strip() for name in named if name in given]
        for name in named:
            text = text.replace(f"`{name}`", dashed(name))
        contradictions.append(Problem(", ".join(places), text) if places else Problem(*_split(text), is_missing=True))
    return contradictions


def _split(text: str) -> tuple[str, str]:
    """Split `where: what`."""
    head, _, tail = text.partition(": ")
    return (head, tail) if tail else ("settings", text)


def _problem(name: str, details: list[Any], model: type[BaseModel], given: Given | None) -> Problem:
    if given is None and details[0]["type"] == "missing":
        # Only positional settings are without a default.
        return Problem(name.upper(), "is missing", _example(name))
    field = _Field(
        annotation=model.model_fields[name].annotation if name in model.model_fields else None,
        where=dashed(name) if given is None else given.where,
        text=f"{details[0]['input']!r} (the default)" if given is None else given.text,
    )
    if field.num_values is not None and any(detail["type"] in ("missing", "too_long") for detail in details):
        needs = worded("needs {number:#value}", {"number": field.num_values})
        return Problem(field.where, needs, given=field.text)
    if field.section is not None:
        return _section_problem(field, field.section, details[0])
    return _value_problem(field, details)


@dataclass(frozen=True)
class _Field:
    """The wrong field: its type, and how and where it was set."""

    annotation: Any
    where: str
    text: str

    @property
    def num_values(self) -> int | None:
        return length(self.annotation)

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of its value, or of the entries of its list."""
        return section(self.annotation) or (section(self._item) if self._is_list else None)

    @property
    def choices(self) -> list[str]:
        values = all_choices(self.annotation) or (all_choices(self._item) if self._is_list else [])
        return [str(choice) for choice in values]

    @property
    def plugins(self) -> list[str]:
        """Names of plugins that the field takes, too."""
        group = group_of(self._item if self._is_list else self.annotation)
        return [] if group is None else plugins.names(group)

    @property
    def _is_list(self) -> bool:
        return sequence(self.annotation) is not None

    @property
    def _item(self) -> Any:
        return item(self.annotation, 0)


def _value_problem(field: _Field, details: list[Any]) -> Problem:
    """Return the problem of a value, or of an entry of a list of values."""
    inner, wrong = _inner(details[0]["loc"]), details[0]["input"]
    is_entry = bool(inner) and isinstance(inner[0], int)
    entry = f"value {inner[0] + 1} " if is_entry else ""
    raised = [_own_words(detail) for detail in details if detail["type"] in ("value_error", "assertion_error")]
    others = [detail for detail in details if detail["type"] != NO_SUCH_PLUGIN]
    phrases = [*map(_phrase, others), *(["a plugin's: " + ", ".join(field.plugins)] if field.plugins else [])]
    what = raised[0] if raised else f"must be {', or '.join(dict.fromkeys(phrases))}"
    meant = nearest(wrong, field.choices) if isinstance(wrong, str) and not raised else None
    advice = next((error.hint for detail in details if isinstance(error := _raised(detail), PacelineError)), "")
    if not advice and len(others) < len(details):
        advice = _PLUGIN_HINTS[plugins.are_enabled()]
    hint = f"did you mean {meant}?" if meant else advice
    return Problem(field.where, entry + what, hint, field.text)


def _raised(detail: Any) -> object:
    """Return the error that a validator of the setting raised."""
    return detail.get("ctx", {}).get("error")


def _section_problem(field: _Field, model: type[BaseModel], detail: Any) -> Problem:
    """Return the problem of a setting inside a nested section."""
    where, text, inner = field.where, field.text, _inner(detail["loc"])
    is_entry = bool(inner) and isinstance(inner[0], int)
    entry = f"entry {inner[0] + 1}: " if is_entry else ""
    path = entry + ".".join(str(part) for part in (inner[1:] if entry else inner))
    if detail["type"] == "extra_forbidden":
        meant = nearest(str(inner[-1]), model.model_fields)
        every = f"there are: {', '.join(model.model_fields)}"
        hint = f"did you mean {meant}?" if meant else every
        return Problem(where, f"{path}: there is no such setting", hint, text)
    if detail["type"] == "missing":
        return Problem(where, f"{path} is missing", given=text)
    if detail["type"] in ("model_type", "model_attributes_type"):
        keys = ",".join(f"{name}=..." for name in model.model_fields)
        return Problem(where, "cannot be understood", f"write {keys} or a JSON object", text)
    raised: Any = _raised(detail)
    if raised is not None:  # by a validator of the setting
        return Problem(where, str(raised), raised.hint if isinstance(raised, PacelineError) else "", text)
    must = f"{path} must be {_phrase(detail)}"
    return Problem(where, must, given=text)


def _inner(location: tuple[Any, ...]) -> list[Any]:
    """Return indices and keys below a field. Names before the first index are pydantic's for the parts of a union."""
    rest = list(location[1:])
    first = next((at for at, part in enumerate(rest) if isinstance(part, int)), None)
    return [] if first is None else rest[first:]


def _phrase(detail: Any) -> str:
    """Return what a value must be, to follow "must be"."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _LIMITS:
        word, limit = _LIMITS[kind]
        return word.format(limit=f"{context[limit]:g}")
    if kind == "literal_error":
        options = re.sub(r"'", "", str(context["expected"]))
        return f"one of {options}" if ", " in options else options
    if kind == "string_pattern_mismatch":
        return f"text of the form {context['pattern']}"
    for pattern, phrase in _KINDS:
        if re.match(pattern, kind):
            return phrase
    return str(detail["msg"]).lower().removeprefix("input should be ").removeprefix("value should be ")


def _own_words(detail: Any) -> str:
    error = detail.get("ctx", {}).get("error")
    return str(error if error is not None else detail["msg"])


def _example(name: str) -> str:
    return _EXAMPLES.get(name, "")
