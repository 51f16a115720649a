"""`--help` and shell completion, made by tyro from the same models that are loaded.

tyro counts letters, and one of Chinese is two columns wide: help in other languages than English is drawn here, with
the same boxes.
"""

from __future__ import annotations

import functools
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from pydantic import BaseModel, ConfigDict, create_model

from paceline.config.aliases import SHORT
from paceline.config.parse import is_flag, item, length, section, sequence, variants
from paceline.config.plugin_name import all_choices, group_of
from paceline.config.sections import Option, Part, parts
from paceline.core.language import ENGLISH, language, translate

_ANY_NAME = ConfigDict(protected_namespaces=())  # such as `model_size`, of which older versions of pydantic warn

CONFIG_OPTION = Option(
    "config", Path | None, None, False, "YAML file with settings; may be given several times, later ones win."
)
Command = tuple[type[BaseModel], Sequence[str]]
"""A model and its positional fields."""


def show_help(
    model: type[BaseModel], *, prog: str, positional: Sequence[str] = (), hidden: Sequence[str] = ()
) -> NoReturn:
    """Print a command's options, section by section, without those that are not the user's to give, and leave."""
    if language() != ENGLISH:
        _show_translated(model, prog, positional, hidden)
        raise SystemExit(0)
    tyro.cli(_screen(model, positional, hidden), prog=prog, description=_about(model), args=["--help"])
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


def _screen(model: type[BaseModel], positional: Sequence[str], hidden: Sequence[str] = ()) -> type[BaseModel]:
    """Return a model with one group per section: tyro shows a box for each."""
    fields: dict[str, Any] = {}
    for part in _all_parts(model, hidden):
        chosen: dict[str, Any] = {option.name: _field(option, option.name in positional) for option in part.options}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Field name", category=UserWarning)  # `json`
            group = create_model(part.name, __doc__=part.about, __config__=_ANY_NAME, **chosen)
        fields[f"{part.name}_"] = (Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=part.name)], ...)
    screen: type[BaseModel] = create_model(model.__name__, **fields)
    return screen


def _all_parts(model: type[BaseModel], hidden: Sequence[str] = ()) -> list[Part]:
    groups = [
        Part(part.name, part.about, tuple(option for option in part.options if option.name not in hidden))
        for part in parts(model)
    ]
    return [Part(groups[0].name, groups[0].about, (*groups[0].options, CONFIG_OPTION)), *groups[1:]]


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


# -- in other languages ------------------------------------------------------------------------------------------------

_PIECE = re.compile(r"(?:[\u2e80-\u9fff]|[^\s\u2e80-\u9fff\uff00-\uffef]+|[\uff00-\uffef])[，。；：、？！）”]*|\s+")
"""A letter of Chinese or a word, with the marks that must not begin a line; or space."""
_MARGIN = 18
"""Columns of the names of options; a longer one has a line of its own."""


def _show_translated(model: type[BaseModel], prog: str, positional: Sequence[str], hidden: Sequence[str]) -> None:
    """Print help as tyro does, in the language of the reader."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for text in _translated(model, prog, positional, hidden, min(console.width, 120)):
        console.print(text)


def _translated(
    model: type[BaseModel], prog: str, positional: Sequence[str], hidden: Sequence[str], width: int
) -> Iterator[str]:
    groups = _all_parts(model, hidden)
    words = [_words(option, True) for part in groups for option in part.options if option.name in positional]
    yield " ".join([translate("usage:"), prog, "[-h]", translate("[OPTIONS]"), *words]) + "\n"
    yield "\n".join(wrapped(translate(" ".join(_about(model).split())), width)) + "\n"
    places = [option for part in groups for option in part.options if option.name in positional]
    if places:
        rows = [(_words(each, True), _meaning(each)) for each in places]
        yield _box(translate("positional arguments"), "", rows, width)
    yield _box(translate("options"), "", [("-h, --help", translate("show this help message and exit"))], width)
    for part in groups:
        rows = [(_words(each, False), _meaning(each)) for each in part.options if each.name not in positional]
        if rows:
            yield _box(translate("{section} options").format(section=part.name), translate(part.about), rows, width)


def _words(option: Option, is_positional: bool) -> str:
    """Return what is typed: `--lr FLOAT`, `-O {0,1}, --level {0,1}`, `--json, --no-json`."""
    if is_positional:
        return option.name.upper() + (" ..." if sequence(option.annotation) is not None else "")
    name = option.name.replace("_", "-")
    if is_flag(option.annotation):
        return f"--{name}, --no-{name}"
    metavar = _metavar(option.annotation)
    letters = [f"-{letter}" for letter, of in SHORT.items() if of == option.name]
    return ", ".join(f"{each} {metavar}" for each in [*letters, f"--{name}"])


def _meaning(option: Option) -> str:
    default = translate("(default: {value})").format(value=_shown(option.default))
    about, end = translate(option.about), translate("(required)") if option.is_required else default
    return f"{about}{'' if end.startswith('（') else ' '}{end}"


def _box(title: str, about: str, rows: Sequence[tuple[str, str]], width: int) -> str:
    """Return a box with a title, a line about it, and a row for each option."""
    from rich.cells import cell_len

    inner = width - 4
    lines = [*wrapped(about, inner), "─" * inner] if about else []
    for words, meaning in rows:
        texts = wrapped(meaning, inner - _MARGIN - 1)
        if cell_len(words) <= _MARGIN:
            lines.append(words + " " * (_MARGIN + 1 - cell_len(words)) + texts.pop(0))
        else:
            lines += wrapped(words, inner)
        lines += [" " * (_MARGIN + 1) + text for text in texts]
    head = f"╭─ {title} " + "─" * (width - 5 - cell_len(title)) + "╮"
    body = [f"│ {line}{' ' * (inner - cell_len(line))} │" for line in lines]
    return "\n".join([head, *body, "╰" + "─" * (width - 2) + "╯"])


def wrapped(text: str, width: int) -> list[str]:
    """Cut a text into lines of so many columns: between words, and between any two letters of Chinese."""
    from rich.cells import cell_len

    lines = [""]
    for piece in _PIECE.findall(text):
        if piece.isspace():
            piece = " "
        if cell_len(lines[-1] + piece) > width and lines[-1]:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += piece.lstrip() if not lines[-1] else piece
        while cell_len(lines[-1]) > width:  # a word that is longer than a line
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]
