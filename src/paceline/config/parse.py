"""From the text a user writes, in a file or as words, to a value that a model can check.

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
    """A value as it was set: what, and where."""

    raw: Any
    """Text, None, a list or a mapping of such."""
    where: str
    text: str
    """As it was typed, for messages."""
    place: Place


def variants(annotation: Any) -> list[Any]:
    """The types that a field may take, without their limits."""
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
    """The words that a field names itself."""
    return [value for kind in variants(annotation) if get_origin(kind) is Literal for value in get_args(kind)]


def sequence(annotation: Any) -> Any | None:
    """The tuple or list among the types of a field."""
    return next((kind for kind in variants(annotation) if get_origin(kind) in (tuple, list)), None)


def length(annotation: Any) -> int | None:
    """How many values a tuple holds; None where any number does."""
    kind = sequence(annotation)
    if kind is None or get_origin(kind) is list or get_args(kind)[-1] is ...:
        return None
    return len(get_args(kind))


def item(annotation: Any, index: int) -> Any:
    """The type of one entry of a tuple or list."""
    arguments = [argument for argument in get_args(sequence(annotation)) if argument is not ...]
    return arguments[min(index, len(arguments) - 1)] if arguments else str


def section(annotation: Any) -> type[BaseModel] | None:
    """The model among the types of a field."""
    models = [kind for kind in variants(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None


def convert(annotation: Any, raw: Any, *, is_typed: bool = False) -> Any:
    """What `raw` means for a field of this type; text that means nothing is left for the model to refuse.

    Where text is wanted, "none" means nothing only on the command line: a file has a word of its own for it.
    """
    if isinstance(raw, str):
        for value in choices(annotation):
            if str(value) == raw:
                return value
        may_mean_none = may_be_none(annotation) and (is_typed or str not in variants(annotation))
        if raw.lower() in ("none", "null") and may_mean_none:
            return None
        if sequence(annotation) is not None:
            raw = expand(annotation, [raw])
        elif section(annotation) is not None or any(get_origin(kind) is dict for kind in variants(annotation)):
            raw = _mapping(raw)
    model = section(annotation)
    if isinstance(raw, dict) and model is not None:
        named = {str(name).replace("-", "_"): value for name, value in raw.items()}
        fields = model.model_fields
        return {
            name: convert(fields[name].annotation, value) if name in fields else value for name, value in named.items()
        }
    if isinstance(raw, list) and sequence(annotation) is not None:
        return [convert(item(annotation, index), value) for index, value in enumerate(raw)]
    return raw


def expand(annotation: Any, words: list[str]) -> list[Any]:
    """Entries of a tuple from words: one each, several with commas between, or a JSON list."""
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
    """`{"a": 1}` or `a=1,b=2` as a mapping; other text as it is."""
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
