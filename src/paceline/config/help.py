"""`--help` and shell completion, made by tyro from the same models that are loaded."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from pydantic import BaseModel, ConfigDict, create_model

from paceline.config.aliases import SHORT
from paceline.config.parse import is_flag, item, length, section, sequence, variants
from paceline.config.plugin_name import all_choices, group_of
from paceline.config.sections import Option, Part, parts

_ANY_NAME = ConfigDict(protected_namespaces=())  # such as `model_size`, of which older versions of pydantic warn

_CONFIG = Option(
    "config", Path | None, None, False, "YAML file with settings; may be given several times, later ones win."
)
Command = tuple[type[BaseModel], Sequence[str]]
"""A model and its positional fields."""


def show_help(model: type[BaseModel], *, prog: str, positional: Sequence[str] = ()) -> NoReturn:
    """Print a command's options, section by section, and leave."""
    tyro.cli(_screen(model, positional), prog=prog, description=_about(model), args=["--help"])
    raise SystemExit(0)


def completion(commands: Mapping[str, Command], *, prog: str, shell: Literal["bash", "zsh", "fish"]) -> NoReturn:
    """Print a script for the shell that completes commands, options and their words."""
    each: list[Any] = [
        Annotated[_screen(model, positional), tyro.conf.subcommand(name=name)]
        for name, (model, positional) in commands.items()
    ]
    any_of_them: Any = functools.reduce(operator.or_, each)
    tyro.cli(any_of_them, prog=prog, args=["--tyro-print-completion", shell])
    raise SystemExit(0)


def _screen(model: type[BaseModel], positional: Sequence[str]) -> type[BaseModel]:
    """Return a model with one group per section: tyro shows a box for each."""
    groups = parts(model)
    head = Part(groups[0].name, groups[0].about, (*groups[0].options, _CONFIG))
    fields: dict[str, Any] = {}
    for part in [head, *groups[1:]]:
        chosen: dict[str, Any] = {option.name: _field(option, option.name in positional) for option in part.options}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Field name", category=UserWarning)  # `json`
            group = create_model(part.name, __doc__=part.about, __config__=_ANY_NAME, **chosen)
        fields[f"{part.name}_"] = (Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=part.name)], ...)
    screen: type[BaseModel] = create_model(model.__name__, **fields)
    return screen


def _field(option: Option, is_positional: bool) -> Any:
    """Return the field that tyro shows. Defaults are text: nothing is parsed here."""
    hint = "(required)" if option.is_required else f"(default: {_shown(option.default)})"
    if is_positional:
        metavar = option.name.upper() + (" ..." if sequence(option.annotation) is not None else "")
        argument = tyro.conf.arg(metavar=metavar, help=option.about, help_behavior_hint="")
        return Annotated[str, tyro.conf.Positional, argument], ...
    if is_flag(option.annotation):
        return Annotated[bool, tyro.conf.arg(help=option.about, help_behavior_hint=hint)], bool(option.default)
    words = [str(choice) for choice in all_choices(option.annotation)]
    kind: Any = Path if Path in variants(option.annotation) else str
    if words and len(_kinds(option.annotation)) == 1:
        kind = Literal[tuple(words)]
    aliases = [f"-{letter}" for letter, name in SHORT.items() if name == option.name]
    argument = tyro.conf.arg(
        metavar=_metavar(option.annotation), help=option.about, help_behavior_hint=hint, aliases=aliases
    )
    return Annotated[kind | None, argument], None


def _metavar(annotation: Any) -> str:
    inner = sequence(annotation)
    if inner is not None:
        model = section(item(annotation, 0))
        count = length(annotation)
        one = ",".join(f"{name}=X" for name in model.model_fields) if model else _metavar(item(annotation, 0))
        return f"{one} ..." if count is None else " ".join([one] * count)
    names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
    words = all_choices(annotation)
    shown = ["{" + ",".join(map(str, words)) + "}"] if words else []
    return "|".join([*shown, *(names.get(kind, "VALUE") for kind in _kinds(annotation) if not all_choices(kind))])


def _kinds(annotation: Any) -> list[Any]:
    """Return the types of a field without None, and without the text that names plugins: their words are listed."""
    is_named = group_of(annotation) is not None
    return [kind for kind in variants(annotation) if kind is not type(None) and not (is_named and kind is str)]


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _about(model: type[BaseModel]) -> str:
    return model.__doc__ or ""
