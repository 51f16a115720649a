"""Writes docs/together.md and its twin: what cannot go together, from the declarations that checks are made of.

`python -m tools.docs.together` writes the page; `tests/test_docs.py` fails while it differs from that.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator

import paceline
from paceline.config.settings import TrainConfig, exclusions_of
from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.train.autotune.limits import GRAPHS, KERNELS
from paceline.train.find_task import find_task, recipe_names
from tools.docs.pages import in_chinese, text, write

__all__ = ["in_chinese", "page"]

HEAD = """\
<!-- Written by tools/docs/together.py from the declarations in the code: change those, not this page. -->
# What goes together

Everything, except what is on this page. Each entry has a reason: **mathematics** (the pair has no meaning, or no exact
result), **hardware** (the device cannot), **one thing twice** (both settings say the same thing, and one must win), or
**not written** (it could be, and is not yet).
Whatever is not here trains, with the same losses as without the other feature where that one changes no numbers.
`tests/promises/test_together.py` takes features two at a time, on 1 and 2 ranks: each pair trains with the losses that
it must have, or is refused by an entry of this page and by nothing else. CI runs a sample, `make full` all of them.
"""
SETTINGS = """\
## Refused when the settings are read

Exit code 2, before anything is started or written; all mistakes are shown at once, each with what to type instead.
"""
ERRORS = """\
## Refused when a run starts or trains

These depend on what the run turns out to be: its model, its data, its ranks, its device.
"""
LEFT_OUT = """\
## What `-O4` leaves out

Nothing is refused here: `-O4` takes the fastest of the other ways, and the first lines of a run say what was left out.
"""


def page() -> str:
    """Return the whole page."""
    blocks = [
        text(HEAD),
        text(SETTINGS),
        _table(_of_settings()),
        text(ERRORS),
        _table(_of_errors()),
        text(LEFT_OUT),
        _limits(),
    ]
    return "\n".join(blocks)


def _of_settings() -> list[Exclusion]:
    sections = [TrainConfig, *(find_task(name).Settings for name in recipe_names())]
    return list(dict.fromkeys(each for section in sections for each in exclusions_of(section)))


def _of_errors() -> list[Exclusion]:
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    errors = sorted(_subclasses(PacelineError), key=lambda error: (error.__module__, error.__name__))
    return list(dict.fromkeys(each for error in errors for each in error.excludes))


def _subclasses(kind: type[PacelineError]) -> Iterator[type[PacelineError]]:
    for error in kind.__subclasses__():
        if error.__module__.startswith("paceline."):
            yield error
        yield from _subclasses(error)


def _table(entries: Iterable[Exclusion]) -> str:
    rows = [text("| | and | | why |"), "|---|---|---|---|"]
    rows += [f"| {' | '.join(map(text, (each.first, each.second, each.kind, each.reason)))} |" for each in entries]
    return "\n".join(rows) + "\n"


def _limits() -> str:
    rows = [text("| without | with | why |"), "|---|---|---|"]
    for part, limits in (("kernels of the task", KERNELS), ("CUDA graphs", GRAPHS)):
        rows += [f"| {text(part)} | {text(each.beside)} | {text(each.reason)} |" for each in limits]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    write("together", page)
