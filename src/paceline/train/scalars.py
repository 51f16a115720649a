"""Numbers of a task's own in training: `self.log("accuracy", right, len(grain))` in `loss`, `after_step` and so on.

Sums and weights of all grains and ranks since the last log line are added, then divided once; nothing is read from the
device before something is logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.observe.records import STEP_KEYS
from paceline.world.link import Link


class LogName(PacelineError):
    """A number of a task with the name of one that every step has."""

    name: str
    sentence = "`self.log({name!r}, ...)`: every step has a number of this name already"
    hint = "choose another name, such as 'train_{name}'"


class LogUnseen(PacelineError):
    """A number that a task logs in a way which the other ranks cannot know of."""

    name: str
    sentence = (
        "`self.log({name!r}, ...)` is called by code outside of the task's class, so other ranks do not wait for it"
    )
    hint = "call `self.log` in a method of the task"


class Scalars:
    """Sums and weights by name since the last log line."""

    def __init__(self, link: Link, is_used: bool, is_counted: Callable[[], bool]) -> None:
        """`is_used` is the same on all ranks; `is_counted` tells if what is computed now belongs to training."""
        self._link, self._is_used, self._is_counted = link, is_used or not link.has_group, is_counted
        self._sums: dict[str, tuple[Any, Any]] = {}

    def add(self, name: str, total: Any, weight: Any) -> None:
        """Add a sum and its weight; numbers, or tensors with one element."""
        if not self._is_counted():
            return
        if name in STEP_KEYS:
            raise LogName(name)
        if not self._is_used:
            raise LogUnseen(name)
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + _number(total), before[1] + _number(weight))

    def clear(self) -> None:
        """Forget what was added, as by steps that were only measured."""
        self._sums = {}

    def read(self) -> dict[str, float]:
        """Return the quotients over all ranks, and start anew. All ranks must call it."""
        if not self._is_used:
            return {}
        own = {name: (float(total), float(weight)) for name, (total, weight) in self._sums.items()}
        self._sums = {}
        totals: dict[str, tuple[float, float]] = {}
        for ranks_sums in self._link.gather_objects(own) if self._link.has_group else [own]:
            for name, (total, weight) in ranks_sums.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + weight)
        return {name: total / weight if weight else math.nan for name, (total, weight) in totals.items()}


def _number(value: Any) -> Any:
    return value.detach().to(torch.float64).sum() if isinstance(value, Tensor) else float(value)


def calls_log(task: type) -> bool:
    """Return True if a method of a task's class, or of its bases below `Task`, may call `self.log`.

    Told by the code alone, so that all ranks have the same answer before anything is logged.
    """
    classes = [
        each for each in task.__mro__ if each is not object and not each.__module__.startswith("paceline.train.")
    ]
    functions = [value for each in classes for value in vars(each).values()]
    functions = [getattr(value, "__func__", value) for value in functions]
    return any(_names_log(value.__code__) for value in functions if hasattr(value, "__code__"))


def _names_log(code: CodeType) -> bool:
    return "log" in code.co_names or any(_names_log(each) for each in code.co_consts if isinstance(each, CodeType))
