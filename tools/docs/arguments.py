"""Writes src/paceline/config/arguments.py: the settings as keyword arguments, for type checkers and editors.

`python -m tools.docs.arguments` writes the file; `tests/config/test_arguments.py` fails while it differs from that.
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from paceline.config.sections import Option, parts
from paceline.config.settings import DataSettings, EngineConfig, Section, TrainConfig

FILE = Path(__file__).parents[2] / "src" / "paceline" / "config" / "arguments.py"
HEAD = '''\
"""The settings as keyword arguments of `fit`, `Engine` and `Engine.batches`, for type checkers and editors.

Written by tools/docs/arguments.py from the settings themselves: change those, not this file. A type here is what may be
given: a path also as text, a tuple as any sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from paceline.config.settings import GroupSettings

'''
MORE = {"precision": "str", "shard": "str | bool", "scale_lr": "bool", "profile": "bool"}
"""Further types of settings that understand words of other toolkits, or yes and no."""
CLASSES: tuple[tuple[str, str, type[Section], str], ...] = (
    ("EngineArguments", "TypedDict", EngineConfig, "Settings of `paceline.Engine`."),
    ("DataArguments", "TypedDict", DataSettings, "Settings of `Engine.batches`."),
    ("TrainArguments", "EngineArguments, DataArguments", TrainConfig, "Settings of `paceline.fit`."),
)


def module() -> str:
    """Return the whole file."""
    blocks, known = [], set[str]()
    for name, bases, model, about in CLASSES:
        options = [option for part in parts(model) for option in part.options]
        own = [option for option in options if bases == "TypedDict" or option.name not in known]
        known |= {option.name for option in own}
        blocks.append(f'class {name}({bases}, total=False):\n    """{about}"""\n\n' + "".join(_lines(own, model)))
    return HEAD + "\n" + "\n\n".join(blocks)


def _lines(options: list[Option], model: type[BaseModel]) -> Iterator[str]:
    kinds = get_type_hints(model)
    for option in options:
        words = dict.fromkeys([*_written(kinds[option.name]), *filter(None, [MORE.get(option.name)])])
        written = " | ".join(sorted(words, key=lambda word: word == "None"))
        about = textwrap.fill(f'"""{option.about}"""', 115, break_long_words=False, break_on_hyphens=False)
        yield f"    {option.name}: {written}\n" + textwrap.indent(about, "    ") + "\n"


def _written(kind: Any) -> list[str]:
    """Return the types that may be given for one that a setting has."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _written(inner[0])
    if origin in (Union, types.UnionType):
        return [word for part in inner for word in _written(part)]
    if origin is Literal:
        return [f"Literal[{', '.join(_quoted(value) for value in inner)}]"]
    if origin in (tuple, list):
        entries = dict.fromkeys(word for part in inner if part is not ... for word in _written(part))
        return [f"Sequence[{' | '.join(entries)}]"]
    if kind is type(None):
        return ["None"]
    if kind is Path:
        return ["str", "Path"]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind.__name__, "Mapping[str, object]"]
    assert kind in (int, float, str, bool), f"tools/docs/arguments.py cannot write {kind}"
    return [kind.__name__]


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
