"""A YAML text and where in it each value stands, so that a mistake can be shown with its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.config.problems import Problem
from paceline.config.yaml_text import YamlText

Location = tuple[str | int, ...]
"""Keys and indices from the root of a document to a value."""


@dataclass(frozen=True)
class Document:
    """Content of a YAML file, or of a mapping that never was one."""

    name: str
    value: Any
    lines: Mapping[Location, int]
    repeated: tuple[Problem, ...] = ()
    """Keys that are given twice; YAML itself would silently take the last."""

    def where(self, location: Location) -> str:
        """`net.yaml:37: block 3: kernel`."""
        return f"{self._place(location)}: {described(location)}" if location else self._place(location)

    def _place(self, location: Location) -> str:
        # A value that came by a merge key or an interpolation has no line of its own: the nearest one above counts.
        for end in range(len(location), 0, -1):
            if location[:end] in self.lines:
                return f"{self.name}:{self.lines[location[:end]]}"
        return self.name


def described(location: Location) -> str:
    """A location for people: blocks are counted from 1."""
    index = next((at for at, part in enumerate(location) if isinstance(part, int)), None)
    if index is None:
        return ".".join(str(part) for part in location)
    number, rest = int(location[index]) + 1, location[index + 1 :]
    kind = "label" if location[index - 1] in ("labels", "vocabulary") else "block"
    return ": ".join([f"{kind} {number}", ".".join(str(part) for part in rest)]) if rest else f"{kind} {number}"


def parse(name: str, text: str) -> Document:
    """Read YAML; nothing in it is executed. Raises `NotYaml`."""
    content = YamlText(name, text)
    if content.root is None:
        return Document(name, None, {})
    lines, repeated = _lines(name, content.root)
    return Document(name, content.construct(), lines, repeated)


def _lines(name: str, root: yaml.Node) -> tuple[dict[Location, int], tuple[Problem, ...]]:
    lines: dict[Location, int] = {}
    repeated: list[Problem] = []
    waiting: list[tuple[Location, yaml.Node]] = [((), root)]
    while waiting:
        location, node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            for index, entry in enumerate(node.value):
                lines[(*location, index)] = entry.start_mark.line + 1
                waiting.append(((*location, index), entry))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner, line = (*location, str(key.value)), key.start_mark.line + 1
                if inner in lines and key.tag != "tag:yaml.org,2002:merge":
                    what = f"given twice, first in line {lines[inner]}"
                    repeated.append(Problem(f"{name}:{line}: {described(inner)}", what, "keep one of them"))
                lines[inner] = line
                waiting.append((inner, value))
    return lines, tuple(repeated)
