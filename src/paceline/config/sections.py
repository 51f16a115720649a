"""The settings of a model as their author described them: section by section, for help, files and docs."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined


@dataclass(frozen=True)
class Option:
    """One setting."""

    name: str
    annotation: Any
    default: Any
    is_required: bool
    about: str


@dataclass(frozen=True)
class Part:
    """The settings of one section class."""

    name: str
    about: str
    options: tuple[Option, ...]


def parts(model: type[BaseModel]) -> list[Part]:
    """Return the settings by the class that first named them, with the defaults of `model`."""
    by_class: dict[type[BaseModel], list[Option]] = {}
    for name, field in model.model_fields.items():
        owners = [each for each in model.__mro__ if name in inspect.get_annotations(each)]
        owner = owners[-1] if owners else model
        about = next((text for each in owners if (text := docs(each).get(name))), "")
        default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
        option = Option(name, field.annotation, default, field.is_required(), about)
        by_class.setdefault(owner, []).append(option)
    return [
        Part(_title(owner), inspect.cleandoc(owner.__doc__ or owner.__name__).splitlines()[0], tuple(options))
        for owner, options in by_class.items()
    ]


@functools.cache
def docs(model: type) -> dict[str, str]:
    """Return the docstring below each field of a class, read from its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    except (OSError, TypeError, SyntaxError):  # a class without a file, made at run time
        return {}
    definition = tree.body[0]
    assert isinstance(definition, ast.ClassDef)
    sentences = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            assert isinstance(below, ast.Expr)
            assert isinstance(below.value, ast.Constant)
            sentences[field.target.id] = " ".join(str(below.value.value).split())
    return sentences


def _title(owner: type) -> str:
    """Return the title of a section: `RunSettings` is `run`, `TrainCommand` is `train`."""
    plain = re.sub(r"(Settings|Config|Command|Options)$", "", owner.__name__) or owner.__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", plain).lower()
