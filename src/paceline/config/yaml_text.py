"""YAML that others wrote, within bounds: of size, of depth, and of what aliases stand for.

An alias (`*name`) repeats a value, and aliases of aliases repeat it any number of times: nine lines can stand for more
values than fit into memory, and a value may even hold itself. What a file *amounts to* is counted, before it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from paceline.config.problems import Problem
from paceline.core import bounded_file
from paceline.core.units import size

MAX_BYTES = 1_000_000
"""Of a file. A network of a thousand blocks, or ten thousand labels, have less than half of it."""
MAX_VALUES = 50_000
"""Values that a file may amount to, each alias counted with all that it stands for."""
MAX_CHARACTERS = 4 * MAX_BYTES
"""Characters of these values together."""
MAX_DEPTH = 50
"""Lists in lists, aliases followed."""
MAX_DIGITS = 400
"""Of a number; the largest float has 309. PyYAML multiplies `1:59:59:...` out, which takes hours for long ones."""

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class NotYaml(Exception):
    """Text that is not YAML, or not within bounds, with where and why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_yaml_text(path: Path) -> str:
    """Return the text of a file or pipe that the user named; raises `OSError`, or `UnicodeDecodeError`."""
    return bounded_file.read_text(path, MAX_BYTES, is_any_kind=True)


class YamlText:
    """A YAML text: its nodes, each with its line, and its value. Raises `NotYaml` for a text that is none."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._loader, self.root = self._composed()

    def construct(self) -> Any:
        """Return the value. Nothing in it is executed. Merge keys (`<<`) in `root` are replaced by what they merge."""
        if self.root is None:
            return None
        try:
            return self._loader.construct_document(self.root)
        except yaml.MarkedYAMLError as error:
            raise NotYaml(_syntax(self._name, self._text, error)) from None
        except (ValueError, OverflowError) as error:  # a date or number that is none
            raise NotYaml(Problem(self._name, f"is not YAML: {error}")) from None

    def _composed(self) -> tuple[_Loader, yaml.Node | None]:
        name, text = self._name, self._text
        if len(text) > MAX_BYTES:
            raise NotYaml(Problem(name, f"is larger than {size(MAX_BYTES)}"))
        try:
            loader = _Loader(text)
            return loader, loader.get_single_node()
        except _OutOfBounds as error:
            hint = "an alias (`*name`) repeats what it stands for: write out what is needed" if error.is_alias else ""
            raise NotYaml(Problem(f"{name}:{error.line}", error.what, hint)) from None
        except yaml.MarkedYAMLError as error:
            raise NotYaml(_syntax(name, text, error)) from None
        except yaml.YAMLError as error:  # characters that YAML does not allow
            raise NotYaml(Problem(name, f"is not YAML: {str(error).splitlines()[0]}")) from None


class _OutOfBounds(Exception):
    def __init__(self, line: int, what: str, is_alias: bool) -> None:
        super().__init__(what)
        self.line, self.what, self.is_alias = line, what, is_alias


@dataclass(frozen=True)
class _Weight:
    """What a node amounts to, aliases in it followed."""

    num_values: int
    num_characters: int
    height: int


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader that counts while it composes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._weights: dict[str, _Weight] = {}
        """Of the anchors that are complete."""
        self._num_values = self._num_characters = self._depth = self._deepest = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias = isinstance(event, yaml.AliasEvent)
        values, characters, above = self._num_values, self._num_characters, self._deepest
        self._depth += 1
        self._deepest = self._depth
        if is_alias:
            self._follow(event)
        else:
            self._num_values += 1
            self._num_characters += len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
        self._check(event, is_alias)
        node: yaml.Node | None = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            self._refuse(event, f"a number of {len(node.value)} characters; at most {MAX_DIGITS} are read")
        if not is_alias and event.anchor is not None:
            self._weights[event.anchor] = _Weight(
                self._num_values - values, self._num_characters - characters, self._deepest - self._depth
            )
        self._depth -= 1
        self._deepest = max(above, self._deepest)
        return node

    def _follow(self, event: Any) -> None:
        if event.anchor not in self.anchors:
            return  # PyYAML says so
        weight = self._weights.get(event.anchor)
        if weight is None:
            self._refuse(event, f"`*{event.anchor}` stands for what it is part of", is_alias=True)
        self._num_values += weight.num_values
        self._num_characters += weight.num_characters
        self._deepest = self._depth + weight.height

    def _check(self, event: Any, is_alias: bool) -> None:
        if self._num_values > MAX_VALUES:
            self._refuse(event, f"more than {MAX_VALUES:,} values up to here", is_alias=is_alias)
        if self._num_characters > MAX_CHARACTERS:
            self._refuse(event, f"more than {MAX_CHARACTERS:,} characters up to here", is_alias=is_alias)
        if self._deepest > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} deep", is_alias=is_alias)

    def _refuse(self, event: Any, what: str, *, is_alias: bool = False) -> NoReturn:
        raise _OutOfBounds(event.start_mark.line + 1, what, is_alias)


def _syntax(name: str, text: str, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    reason = error.problem or error.context or "it cannot be read"
    what = f"is not YAML: {reason}"
    if mark is None:
        return Problem(name, what)
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    shown = line.strip() and len(line) <= 200
    hint = f"{line}\n{' ' * mark.column}^" if shown else ""
    return Problem(f"{name}:{mark.line + 1}:{mark.column + 1}", what, hint)
