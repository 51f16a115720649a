"""What is wrong with an option, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.core.errors import PacelineError


class OptionRefused(PacelineError):
    """An option that is not known, or that means nothing we can do."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


def check_known(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(names)}"
            raise OptionRefused(f"there is no option `{where}{name}`", hint)


def choose(name: str, word: Any, ours: Mapping[str, str]) -> str:
    if word not in ours:
        raise OptionRefused(f"`{name}` {word!r} is not translated", f"translated are {', '.join(ours)}")
    return ours[word]


def number(given: Mapping[str, Any], name: str, default: int) -> int:
    """A count; RETURNN allows functions of the epoch in its place."""
    value = given.get(name, default)
    if type(value) is not int:
        raise OptionRefused(f"`{name}` is {value!r}; here it is one whole number")
    return value


def real(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionRefused(f"`{name}` is {value!r}, not a number")
    return value
