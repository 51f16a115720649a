"""Writes docs/options.md and its twin: every option of every command, from the models that commands are made of.

`python -m tools.docs.options` writes the page; `tests/test_docs.py` fails while it is not what this script would write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.cli.completion import options_of
from paceline.cli.main import command_table
from paceline.config.aliases import SHORT, aliases_of
from paceline.config.command_line import dashed
from paceline.config.parse import choices, is_flag, item, length, section, sequence, variants
from paceline.config.plugin_name import group_of
from paceline.config.sections import Option, parts
from paceline.config.settings import GroupSettings, TrainConfig
from paceline.lab.sweep.command import SweepCommand
from paceline.lab.tune.command import TuneCommand
from paceline.train.find_task import find_task, recipe_names
from tools.docs.pages import in_chinese, text, write

__all__ = ["in_chinese", "page"]

HEAD = """\
<!-- Written by tools/docs/options.py from the settings themselves: change those, not this page. -->
# Options

Every setting has one name everywhere: `global_batch` in Python and in YAML, `--global-batch` on the command line.
Defaults < YAML files (`--config FILE`, several allowed, later ones win) < the command line. `paceline COMMAND --help`
shows the same tables.

- A flag is set by its name (`--benchmark`) and taken back by `--no-benchmark`.
- A list takes several words: `--milestones 1000 2000`.
- A setting marked `free` may be another when a run is resumed. Any other change is refused unless `--allow-change` is
  given, because it would change what is computed.
- A setting marked `per rank` may differ between the ranks of a run. All others are compared when the ranks meet.
"""
NAMES = {int: "integer", float: "number", str: "text", Path: "path", bool: "flag"}
LIMITS = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}"}
SHARED = {
    "demo": "All options of `paceline train`; what is not set has values that suit the demo.",
    "tune": "All options of `paceline train` that say what is trained and how, and:",
    "sweep": "All options of `paceline train`, which all trials share, and:",
}
"""Take the options of `train`."""


def page() -> str:
    """The whole page."""
    blocks = [f"{text(HEAD)}{_aliases()}\n"]
    for command, about in command_table():
        model, positional = options_of(command)
        what = text(about)
        blocks.append(f"## paceline {command}\n\n{what[:1].upper()}{what[1:]}{text('.')}\n")
        if command in SHARED:
            blocks.append(f"{text(SHARED[command])}\n")
            own: dict[str, type[BaseModel]] = {"tune": TuneCommand, "sweep": SweepCommand}
            blocks += _command(own[command], positional) if command in own else []
            continue
        blocks += _command(model, positional)
        if command == "train":
            blocks += [block for recipe in recipe_names() for block in _recipe(recipe)]
    return "\n".join(blocks)


def _recipe(name: str) -> Iterator[str]:
    """The settings that a recipe has of its own, and its own defaults of those that all have."""
    settings, common = find_task(name).Settings, TrainConfig.model_fields
    own = {field for field in settings.model_fields if field not in common}
    changed = [field for field in common if settings.model_fields[field].default != common[field].default]
    if not own and not changed:
        return
    takes = text("What the recipe `{name}` takes beside the options of `paceline train`.").format(name=name)
    yield f"## paceline train {name}\n\n{takes}\n"
    for part in parts(settings):
        options = [option for option in part.options if option.name in own]
        if options:
            yield f"### {name}: {part.name}\n\n{text(part.about)}\n"
            yield _table(options, settings, ())
    if changed:
        yield f"### {name}: {text('other defaults')}\n"
        options = [option for part in parts(settings) for option in part.options if option.name in changed]
        yield _table(options, settings, ())


def _aliases() -> str:
    same = text("{other} is {name}")
    short = [same.format(other=f"`-{letter}`", name=f"`{dashed(name)}`") for letter, name in SHORT.items()]
    spellings: dict[str, str] = {}
    for settings in (TrainConfig, *(find_task(recipe).Settings for recipe in recipe_names())):
        spellings |= aliases_of(settings)
    long = [same.format(other=f"`{dashed(other)}`", name=f"`{dashed(name)}`") for other, name in spellings.items()]
    return text("- Other spellings: {all}.").format(all=text(", ").join([*short, *long]))


def _command(model: type[BaseModel], positional: Sequence[str]) -> Iterator[str]:
    for part in parts(model):
        yield f"### {part.name}\n\n{text(part.about)}\n"
        yield _table(part.options, model, positional)
        if any(section(item(option.annotation, 0)) is GroupSettings for option in part.options if _many(option)):
            one = text("One entry of `groups`, typed as `--groups match='*.bias',weight_decay=0`:")
            yield f"{one}\n\n{_group_table()}"


def _group_table() -> str:
    return _table([option for part in parts(GroupSettings) for option in part.options], GroupSettings, ())


def _many(option: Option) -> bool:
    return sequence(option.annotation) is not None


def _table(options: Iterable[Option], model: type[BaseModel], positional: Sequence[str]) -> str:
    rows = [text("| setting | type | default | meaning |"), "|---|---|---|---|"]
    for option in options:
        field = model.model_fields[option.name]
        name = f"`{option.name.upper()}`" if option.name in positional else f"`{option.name}`"
        meaning = " ".join([text(option.about), *_marks(field)])
        default = text("required") if option.is_required else f"`{_shown(option.default)}`"
        rows.append(f"| {name} | {_cell(_type(option, field))} | {default} | {_cell(meaning)} |")
    return "\n".join(rows) + "\n"


def _cell(content: str) -> str:
    return content.replace("|", "\\|").strip()


def _marks(field: FieldInfo) -> list[str]:
    marks = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return [f"*{text(mark.replace('_', ' '))}*" for mark in ("free", "per_rank") if marks.get(mark)]


def _type(option: Option, field: FieldInfo) -> str:
    limits = _limits(field.metadata)
    return f"{_kind(option.annotation)} {limits}".strip()


def _kind(annotation: Any) -> str:
    if is_flag(annotation):
        return text("flag")
    if sequence(annotation) is not None:
        number = length(annotation)
        form = text("list of {entry}") if number is None else text("{number} times {entry}")
        return form.format(entry=_entry(annotation), number=number)
    words = [f"`{word}`" for word in choices(annotation)]
    others = [_one(kind) for kind in _kinds(annotation) if not choices(kind)]
    return text(" or ").join([*([text(", ").join(words)] if words else []), *others])


def _entry(annotation: Any) -> str:
    model = section(item(annotation, 0))
    return text("groups") if model is not None else _kind(item(annotation, 0))


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union with their limits, which `variants` leaves out."""
    if get_origin(annotation) is Annotated:
        return [annotation]
    members = list(get_args(annotation)) if len(variants(annotation)) > 1 else [annotation]
    return [member for member in members if member is not type(None)]


def _one(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        plain, *metadata = get_args(kind)
        if group_of(kind) is not None:
            return text("the name of a [plugin](plugins.md)")
        return f"{text(NAMES[plain])} {_limits(metadata)}".strip()
    if sequence(kind) is not None:
        return _kind(kind)
    return text(NAMES.get(kind, "text"))  # a section of its own is named, or given as a file


def _limits(metadata: Sequence[Any]) -> str:
    flat = [each for entry in metadata for each in getattr(entry, "metadata", None) or [entry]]
    found = [LIMITS[name].format(getattr(each, name)) for each in flat for name in LIMITS if hasattr(each, name)]
    return text(" and ").join(found)


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


if __name__ == "__main__":
    write("options", page)
