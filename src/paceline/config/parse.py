"""Conversion of the text in a file or on a command line to values that a model can check.

Everything stays text here as long as possible: a YAML `no` or `1e-3` then means the same as the word on a command line,
and the model alone decides what is a number.
"""

from __future__ import annotations

import json
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from paceline.config.problems import Place


@dataclass(frozen=True)
class Given:
    """A value as it was set, and where."""

    raw: Any
    """Text, None, a list or a mapping of such."""
    where: str
    text: str
    """The value as it was typed, for messages."""
    place: Place


def members(annotation: Any) -> list[Any]:
    """Return the types that a field may have, with their limits."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in members(part)]
    return [annotation]


def variants(annotation: Any) -> list[Any]:
    """Return the types that a field may have, without their limits."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return variants(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in variants(part)]
    return [annotation]


def is_flag(annotation: Any) -> bool:
    return bool in variants(annotation)


def may_be_none(annotation: Any) -> bool:
    return type(None) in variants(annotation)


def choices(annotation: Any) -> list[Any]:
    """Return the values of a field's `Literal`s."""
    return [value for kind in variants(annotation) if get_origin(kind) is Literal for value in get_args(kind)]


def sequence(annotation: Any) -> Any | None:
    """Return the tuple or list among the types of a field."""
    return next((kind for kind in variants(annotation) if get_origin(kind) in (tuple, list)), None)


def length(annotation: Any) -> int | None:
    """Return the number of values of a tuple; None for any number."""
    kind = sequence(annotation)
    if kind is None or get_origin(kind) is list or get_args(kind)[-1] is ...:
        return None
    return len(get_args(kind))


def item(annotation: Any, index: int) -> Any:
    """Return the type of one entry of a tuple or list."""
    arguments = [argument for argument in get_args(sequence(annotation)) if argument is not ...]
    return arguments[min(index, len(arguments) - 1)] if arguments else str


def section(annotation: Any) -> type[BaseModel] | None:
    """Return the model among the types of a field."""
    models = [kind for kind in variants(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None


def convert(annotation: Any, raw: Any, *, is_typed: bool = False) -> Any:
    """Return what `raw` means for a field of this type; text without a meaning is left for the model to refuse.

    Where text is wanted, "none" means None only on the command line: YAML has a word of its own for it.
    """
    if isinstance(raw, str):
        is_none = raw.lower() in ("none", "null") and may_be_none(annotation)
        for value in choices(annotation):
            if str(value) == raw:
                return value
        if is_none and (is_typed or str not in variants(annotation)):
            return None
        raw = _structure(annotation, raw)
    if isinstance(raw, dict) and (model := section(annotation)) is not None:
        return _fields(model, raw)
    if isinstance(raw, list) and sequence(annotation) is not None:
        return [convert(item(annotation, index), value) for index, value in enumerate(raw)]
    return raw


def _structure(annotation: Any, text: str) -> Any:
    """Return the list or mapping that a text stands for where the field takes one, else the text."""
    if sequence(annotation) is not None:
        return expand(annotation, [text])
    if section(annotation) is not None or any(get_origin(kind) is dict for kind in variants(annotation)):
        return _mapping(text)
    return text


def _fields(model: type[BaseModel], raw: dict[Any, Any]) -> dict[str, Any]:
    """Convert the values of a nested section; names may have dashes."""
    named = {str(name).replace("-", "_"): value for name, value in raw.items()}
    fields = model.model_fields
    return {name: convert(fields[name].annotation, value) if name in fields else value for name, value in named.items()}


def expand(annotation: Any, words: list[str]) -> list[Any]:
    """Return the entries of a tuple: a word holds one, several with commas between, or a JSON list."""
    if [word.lower() for word in words] == ["none"] and "none" not in choices(item(annotation, 0)):
        return []
    entries: list[Any] = []
    for word in words:
        parsed = _json(word) if word.startswith("[") else None
        if isinstance(parsed, list):
            entries += parsed
        elif section(item(annotation, 0)) is not None:
            entries.append(word)
        else:
            entries += [part.strip() for part in word.split(",")]
    return entries


def _mapping(text: str) -> Any:
    """Return the mapping of `{"a": 1}` or `a=1,b=2`; other text as it is."""
    if text.startswith("{"):
        parsed = _json(text)
        return parsed if isinstance(parsed, dict) else text
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and separator for name, separator, _ in pairs):
        return text
    return {name.strip(): value.strip() for name, _, value in pairs}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
