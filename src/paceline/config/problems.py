"""Mistakes in settings, collected and shown all at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.config.aliases import MEANT
from paceline.core.errors import PacelineError
from paceline.core.secrets import MASK, is_secret, masked

Place = tuple[int, int]
"""Position of a mistake, for showing mistakes in order: (number of the source, place in it)."""
# Files are counted from 0; command-line words come after any number of them, what is nowhere comes last.
WORDS, NOWHERE = 10**6, 10**7


@dataclass(frozen=True)
class Problem:
    """One mistake: where it was made, why it cannot work, what to type instead."""

    where: str
    """`--lr`, or `train.yaml:12: lr`."""
    what: str
    hint: str = ""
    given: str = ""
    """The value that was set, as it was typed."""
    place: Place = (NOWHERE, 0)
    is_unknown: bool = False
    """There is no setting of this name."""
    is_missing: bool = False
    """Something was to be set and was not."""
    meant: str = ""
    """The setting that this was probably, or certainly, an attempt to set."""

    def __str__(self) -> str:
        name = re.split(r"[\s:]+", self.where)[-1].lstrip("-")
        given = MASK if is_secret(name, self.given) else masked(self.given)
        what = " ".join(filter(None, [self.where, given]))
        return f"{what}: {self.what}"


class SettingsInvalid(PacelineError):
    """Settings that cannot become a run, with every reason."""

    problems: Sequence[Problem]
    prog: str
    sentence = "{text}"
    hint = "{advice}"

    @property
    def text(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"{len(self.problems)} mistakes in the settings of `{self.prog}`"]
        for problem in self.problems:
            lines.append(f"  {problem}")
            if problem.hint:
                lines.append(_indented(problem.hint, "    "))
        return "\n".join(lines)

    @property
    def advice(self) -> str:
        only = self.problems[0].hint if len(self.problems) == 1 else ""
        return _indented(only, "  ").lstrip() if only else f"`{self.prog} --help` lists all options"


def first_lines(lines: Sequence[object], most: int, total: int | None = None, margin: str = "  ") -> list[str]:
    """Return the first `most` lines, and one with the number of the rest; `total` counts those not in `lines`, too."""
    total = len(lines) if total is None else total
    more = [margin + f"... and {total - most:,} more"] if total > most else []
    return [*(f"{margin}{line}" for line in lines[:most]), *more]


def nearest(wrong: str, right: Iterable[str]) -> str | None:
    """Return the name that was probably meant."""
    names = list(right)
    spellings = {name: name for name in names} | {other: name for other, name in MEANT.items() if name in names}
    matches = difflib.get_close_matches(wrong.replace("-", "_").lower(), spellings, n=1, cutoff=0.6)
    return spellings[matches[0]] if matches else None


def _indented(text: str, margin: str) -> str:
    return "\n".join(margin + line for line in text.splitlines())
