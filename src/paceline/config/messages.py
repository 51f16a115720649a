"""What a model says about wrong values, in words for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from paceline.config.command_line import dashed
from paceline.config.parse import Given, choices, item, length, section, sequence
from paceline.config.problems import Problem, nearest

_LIMITS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
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


def problems(error: ValidationError, model: type[BaseModel], given: Mapping[str, Given]) -> dict[str, Problem]:
    """One problem per wrong field."""
    by_field: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        if detail["loc"]:
            by_field.setdefault(str(detail["loc"][0]), []).append(detail)
    found = {name: _problem(name, details, model, given.get(name)) for name, details in by_field.items()}
    return {name: replace(each, place=given[name].place) if name in given else each for name, each in found.items()}


def across(
    error: ValidationError, model: type[BaseModel], given: Mapping[str, Given], wrong: set[str]
) -> list[Problem]:
    """Problems of several fields together; none that are but a consequence of a field that is `wrong` by itself."""
    found = []
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
        found.append(Problem(", ".join(places), text) if places else Problem(*_split(text), is_missing=True))
    return found


def _split(text: str) -> tuple[str, str]:
    """A sentence as where and what."""
    head, _, tail = text.partition(": ")
    return (head, tail) if tail else ("settings", text)


def _problem(name: str, details: list[Any], model: type[BaseModel], given: Given | None) -> Problem:
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    where = given.where if given is not None else dashed(name)
    text = given.text if given is not None else ""
    if given is None and details[0]["type"] == "missing":
        # Only positional settings are without a default.
        return Problem(name.upper(), "is missing", _example(name))
    if given is None:
        text = f"{details[0]['input']!r} (the default)"
    wanted = length(annotation)
    if wanted is not None and any(detail["type"] in ("missing", "too_long") for detail in details):
        return Problem(where, f"needs {wanted} values", given=text)
    inner = _inner(details[0]["loc"])
    if section(annotation) is not None or (sequence(annotation) is not None and section(item(annotation, 0))):
        return _nested(details[0], inner, where, text, annotation)
    phrases = list(dict.fromkeys(_phrase(detail) for detail in details))
    prefix = f"value {inner[0] + 1} " if inner and isinstance(inner[0], int) else ""
    options = choices(annotation) or (choices(item(annotation, 0)) if sequence(annotation) is not None else [])
    wrong = str(details[0]["input"])
    meant = nearest(wrong, [str(option) for option in options]) if isinstance(details[0]["input"], str) else None
    own = [_own_words(detail) for detail in details if detail["type"] in ("value_error", "assertion_error")]
    what = own[0] if own else f"must be {_either(phrases)}"
    return Problem(where, prefix + what, f"did you mean {meant}?" if meant else "", text)


def _nested(detail: Any, inner: list[Any], where: str, text: str, annotation: Any) -> Problem:
    """A mistake inside a setting that has settings of its own."""
    model = section(annotation) or section(item(annotation, 0))
    assert model is not None
    entry = f"entry {inner[0] + 1}: " if inner and isinstance(inner[0], int) else ""
    path = entry + ".".join(str(part) for part in (inner[1:] if entry else inner))
    if detail["type"] == "extra_forbidden":
        meant = nearest(str(inner[-1]), model.model_fields)
        hint = f"did you mean {meant}?" if meant else f"there are: {', '.join(model.model_fields)}"
        return Problem(where, f"{path}: there is no such setting", hint, text)
    if detail["type"] == "missing":
        return Problem(where, f"{path} is missing", given=text)
    if detail["type"] in ("model_type", "model_attributes_type"):
        keys = ",".join(f"{name}=..." for name in model.model_fields)
        return Problem(where, "cannot be understood", f"write {keys} or a JSON object", text)
    own = detail.get("ctx", {}).get("error")
    if own is not None:  # said by the setting itself
        return Problem(where, str(own), getattr(own, "hint", ""), text)
    return Problem(where, f"{path} must be {_phrase(detail)}", given=text)


def _inner(location: tuple[Any, ...]) -> list[Any]:
    """Indices and keys below a field. Names before the first index are pydantic's for the parts of a union."""
    rest = list(location[1:])
    first = next((at for at, part in enumerate(rest) if isinstance(part, int)), None)
    return [] if first is None else rest[first:]


def _phrase(detail: Any) -> str:
    """What a value must be."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _LIMITS:
        word, limit = _LIMITS[kind]
        return f"{word} {context[limit]:g}"
    if kind == "literal_error":
        options = re.sub(r"'", "", str(context["expected"]))
        return f"one of {options}" if ", " in options else options
    for pattern, phrase in _KINDS:
        if re.match(pattern, kind):
            return phrase
    return str(detail["msg"]).lower().removeprefix("input should be ").removeprefix("value should be ")


def _either(phrases: list[str]) -> str:
    return ", or ".join(phrases)


def _own_words(detail: Any) -> str:
    error = detail.get("ctx", {}).get("error")
    return str(error if error is not None else detail["msg"])


def _example(name: str) -> str:
    return {
        "task": "name it first: a recipe, as `paceline train digits ...`, or a class, as `my_task.py:MyTask`",
        "run": "give the folder of a run; `paceline runs` lists them",
    }.get(name, "")
