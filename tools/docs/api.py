"""Writes docs/api.md and its twin in docs/zh: the public names of `paceline`, from their signatures and docstrings.

`python -m tools.docs.api` writes the page; `tests/test_docs.py` fails while it is not what this script would write.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

import paceline
from paceline.config.sections import parts
from paceline.train import task
from tools.docs.pages import in_chinese, text, write

__all__ = ["in_chinese", "page"]

HEAD = """\
<!-- Written by tools/docs/api.py from the docstrings: change those, not this page. -->
# Python API

How these names are used together: [tasks](task.md) and [your own loop](own-loop.md).

## What is stable

The names on this page: those of `paceline` below, and those of these modules. They keep their meaning within a minor
version, and what is to go is said for one minor version before ([versions](versions.md)). Everything else that can be
imported, such as `paceline.train` or `paceline.config`, is ours to move.

Settings are typed: type checkers and editors know every keyword of `fit`, `Engine` and `Engine.batches`. A task's own
settings are known, too, where its class names them (`Settings = MySettings`), or as an object: `fit(task,
MySettings(hidden=64, epochs=3))`.
"""
GROUPS = {
    "Train": (
        "fit",
        "load",
        "Task",
        "Stage",
        "Gathered",
        "Result",
        "Engine",
        "sweep",
        "SweepResult",
        "average",
        "Averaged",
        "compare",
        "Comparison",
        "predict",
        "Prediction",
    ),
    "Data": ("Grain", "Batch", "pad_collate", "PackedDataset"),
    "Around a run": ("Callback", "World", "PacelineError"),
    "Settings": ("TrainConfig",),
}
"""The names in the order of the page; `Watcher` is the earlier name of `Callback`."""
SYNONYMS = {"Watcher"}
MODULES = tuple(
    f"paceline.{name}"
    for name in (
        "settings",
        "datasets",
        "optimizers",
        "layers",
        "checkpoints",
        "records",
        "plugins",
        "asr",
        "translation",
        "continual",
    )
)
"""Public modules beside `paceline`."""


def page() -> str:
    """Return the whole page."""
    missing = set(paceline.__all__) - SYNONYMS - {name for names in GROUPS.values() for name in names}
    missing -= {kind.__name__ for kind in task.OPT_IN}  # listed below `Task`
    assert not missing, f"add {missing} to a group of tools/docs/api.py"
    blocks = [text(HEAD), *_modules()]
    for group, names in GROUPS.items():
        blocks.append(f"## {text(group)}\n")
        for name in names:
            blocks += _entry(name, getattr(paceline, name))
            if name == "Task":
                blocks += _pieces()
    return "\n".join(blocks)


def _modules() -> Iterator[str]:
    """The public modules beside `paceline` itself."""
    rows = [text("| module | for | names |"), "|---|---|---|"]
    for name in MODULES:
        module = importlib.import_module(name)
        names = ", ".join(f"`{each}`" for each in module.__all__)
        rows.append(f"| `{name}` | {_cell(_told(module.__doc__))} | {names} |")
    yield "\n".join(rows) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if not inspect.isclass(value):
        yield _signature(name, value)
        yield _doc(value)
    elif issubclass(value, BaseModel):
        yield _doc(value)
        yield from _settings(value)
    else:
        yield _doc(value)
        yield from _attributes(value)
        yield from _methods(value)


def _pieces() -> Iterator[str]:
    """The base classes that a task may have besides `Task`."""
    yield f"### {text('More that a task may have')}\n"
    yield text("Base classes to inherit from besides `Task`: `class Mine(paceline.Task, paceline.HasStages)`.") + "\n"
    rows = [text("| class | for | methods |"), "|---|---|---|"]
    for kind in task.OPT_IN:
        methods = [(name, each) for name, each in vars(kind).items() if inspect.isfunction(each) and name[0] != "_"]
        shown = [f"`{name}({_arguments(each)})` {_told(each.__doc__)}".strip() for name, each in methods]
        rows.append(f"| `{kind.__name__}` | {_cell(_told(kind.__doc__))} | {'<br>'.join(map(_cell, shown))} |")
    yield "\n".join(rows) + "\n"


def _arguments(function: Any) -> str:
    return ", ".join(name for name in inspect.signature(function).parameters if name != "self")


def _settings(model: type[BaseModel]) -> Iterator[str]:
    """The groups of a settings model; the options page has what each setting means."""
    yield (
        text("Each setting is an argument by its name; [options](options.md) has types, defaults and meanings.") + "\n"
    )
    rows = [text("| group | settings |"), "|---|---|"]
    for part in parts(model):
        rows.append(f"| {part.name} | {', '.join(f'`{option.name}`' for option in part.options)} |")
    yield "\n".join(rows) + "\n"


def _attributes(kind: type) -> Iterator[str]:
    rows = [
        f"| `{name}` | {_cell(annotation)} | {_cell(text(_flat(about)))} |"
        for name, annotation, about in _described(kind)
    ]
    if rows:
        yield "\n".join([text("| attribute | type | meaning |"), "|---|---|---|", *rows]) + "\n"


def _described(kind: type) -> Iterator[tuple[str, str, str]]:
    """Annotated attributes of a class and its properties, each with the docstring that follows it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            yield node.target.id, f"`{ast.unparse(node.annotation)}`", _string(after)
        if isinstance(node, ast.FunctionDef) and _is_public_property(node):
            annotation = "" if node.returns is None else f"`{ast.unparse(node.returns)}`"
            yield node.name, annotation, ast.get_docstring(node) or ""


def _is_public_property(node: ast.FunctionDef) -> bool:
    return not node.name.startswith("_") and any(ast.unparse(each) == "property" for each in node.decorator_list)


def _string(node: ast.stmt | None) -> str:
    """The text of an attribute's docstring, empty where the next statement is none."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _methods(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        is_constructor = name == "__init__" and not hasattr(kind, "__dataclass_fields__")
        if inspect.isfunction(function) and (is_constructor or not name.startswith("_")):
            if is_constructor and not function.__doc__ and kind.__doc__ is None:
                continue
            shown = f"{kind.__name__}" if is_constructor else f"{kind.__name__}.{name}"
            yield _signature(shown, function)
            if function.__doc__:
                yield _doc(function)


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    shown = f"{name}{signature.replace(parameters=parameters)}"
    shown = re.sub(r"'([^']*)'", r"\1", shown) if "Literal" not in shown else shown
    if len(shown) > 100:
        inner = ",\n    ".join(str(each) for each in parameters)
        returns = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
        shown = f"{name}(\n    {inner},\n){returns}"
        shown = re.sub(r"'([^']*)'", r"\1", shown) if "Literal" not in shown else shown
    return f"```text\n{shown}\n```\n"


def _doc(value: Any) -> str:
    return f"{text(inspect.getdoc(value) or '')}\n"


def _cell(content: str) -> str:
    return _flat(content).replace("|", "\\|")


def _told(docstring: str | None) -> str:
    """Return a docstring on one line, in the language of the page."""
    return text(_flat(docstring or ""))


def _flat(content: str) -> str:
    return " ".join(content.split())


if __name__ == "__main__":
    write("api", page)
