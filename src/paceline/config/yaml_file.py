"""Settings from a YAML file, each with the line it stands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from paceline.config.command_line import resolve
from paceline.config.parse import Given
from paceline.config.problems import Problem, nearest
from paceline.config.yaml_text import NotYaml, YamlText, read_yaml_text

_MAX_TEXT = 200
"""Characters of a value in a message."""


def read_file(
    model: type[BaseModel], file: str, positional: Sequence[str] = (), number: int = 0
) -> tuple[dict[str, Given], list[Problem]]:
    """Return what a file, the `number`-th, sets, and its mistakes."""
    path = Path(file)
    try:
        text = read_yaml_text(path)
    except FileNotFoundError:
        return {}, [Problem("--config", "there is no such file", _other_files(path), file, (number, 0))]
    except IsADirectoryError:
        hint = _other_files(path / "any.yaml")
        return {}, [Problem("--config", "is a folder, not a file", hint, file, (number, 0))]
    except UnicodeDecodeError:
        return {}, [Problem("--config", "is not a text file (UTF-8)", "", file, (number, 0))]
    except OSError as error:
        return {}, [Problem("--config", f"cannot be read: {error.strerror}", "", file, (number, 0))]
    try:
        root = YamlText(file, text).root
    except NotYaml as error:
        return {}, [replace(error.problem, place=(number, 0))]
    if root is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode):
        where = f"{file}:{root.start_mark.line + 1}"
        return {}, [Problem(where, "must hold lines of the form `name: value`", place=(number, 0))]
    return _read(model, file, root, positional, number)


def _read(
    model: type[BaseModel], file: str, root: yaml.MappingNode, positional: Sequence[str], number: int
) -> tuple[dict[str, Given], list[Problem]]:
    given: dict[str, Given] = {}
    problems: list[Problem] = []
    options = [name for name in model.model_fields if name not in positional]
    for key_node, node in root.value:
        key, line = _text(key_node), key_node.start_mark.line + 1
        where, place = f"{file}:{line}: {key}", (number, line)
        name = resolve(model, key)
        if name in positional:
            hint = "take this line out"
            problems.append(Problem(where, "is typed on the command line, not set in a file", hint, place=place))
        elif name is None:
            meant = nearest(key, options)
            every = "`--print-config` shows all settings as such a file"
            hint = f"did you mean {meant}?" if meant else every
            problems.append(
                Problem(where, "there is no such setting", hint, _text(node), place, is_unknown=True, meant=meant or "")
            )
        elif name in given:
            what = f"given twice, first in line {given[name].place[1]}"
            problems.append(Problem(where, what, "keep one of the two lines", _text(node), place))
        else:
            given[name] = Given(_raw(node), where, _text(node), place)
    return given, problems


def _raw(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_raw(entry) for entry in node.value]
    return {_text(key): _raw(value) for key, value in node.value}


def _text(node: yaml.Node) -> str:
    """Return a value for messages, its first characters where it is long."""
    text = _written(node, _MAX_TEXT)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _written(node: yaml.Node, room: int) -> str:
    """Return a value as it could be written; what comes after more than `room` characters is left out."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)[: room + 1] or "(empty)"
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, entry) for entry in node.value]
    parts: list[str] = []
    for key, value in pairs:
        part = ("" if key is None else f"{_written(key, room)}: ") + _written(value, room)
        parts.append(part)
        room -= len(part) + 2
        if room < 0:
            break
    inside = ", ".join(parts)
    return f"{{{inside}}}" if isinstance(node, yaml.MappingNode) else f"[{inside}]"


def _other_files(path: Path) -> str:
    """Return a hint: the file that was probably meant, or the YAML files beside it."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    meant = nearest(path.name, names)
    if meant:
        return f"did you mean {folder / meant}?"
    text = "YAML files in {folder}: {names}" if names else "there are no YAML files in {folder}"
    return text.format(folder=folder, names=", ".join(names[:10]))
