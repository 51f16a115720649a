"""A YAML text and where in it each value stands, so that a mistake can be shown with its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.config.problems import Problem

Location = tuple[str | int, ...]
"""Keys and indices from the root of a document to a value."""

MAX_NODES = 100_000
"""Far more than a network needs; aliases of aliases can stand for any number of values."""
MAX_DEPTH = 50
"""An alias may even stand for what it is part of."""


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


class NotYaml(Exception):
    """Text that cannot be read as YAML, with where and why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def described(location: Location) -> str:
    """A location for people: blocks are counted from 1."""
    index = next((at for at, part in enumerate(location) if isinstance(part, int)), None)
    if index is None:
        return ".".join(str(part) for part in location)
    number, rest = int(location[index]) + 1, location[index + 1 :]
    kind = "label" if location[index - 1] in ("labels", "vocabulary") else "block"
    return ": ".join([f"{kind} {number}", ".".join(str(part) for part in rest)]) if rest else f"{kind} {number}"


def parse(name: str, text: str) -> Document:
    """Read YAML; nothing in it is executed."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(name, None, {})
        lines, repeated = _lines(name, node)
        return Document(name, loader.construct_document(node), lines, repeated)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
        raise NotYaml(Problem(where, f"is not YAML: {error.problem or error.context}")) from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise NotYaml(Problem(name, f"is not YAML: {str(error).splitlines()[0]}")) from None
    except (ValueError, OverflowError) as error:  # a date or number that is none
        raise NotYaml(Problem(name, f"is not YAML: {error}")) from None
    except RecursionError:
        raise NotYaml(Problem(name, "is nested too deeply to be a network")) from None


def _lines(name: str, root: yaml.Node) -> tuple[dict[Location, int], tuple[Problem, ...]]:
    lines: dict[Location, int] = {}
    repeated: list[Problem] = []
    waiting: list[tuple[Location, yaml.Node]] = [((), root)]
    while waiting:
        location, node = waiting.pop()
        if len(lines) + len(waiting) > MAX_NODES:
            raise NotYaml(Problem(name, f"holds more than {MAX_NODES} values: it is no network"))
        if len(location) > MAX_DEPTH:
            raise NotYaml(Problem(name, "is nested too deeply to be a network"))
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
