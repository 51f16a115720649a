"""Numbers of a task's own in training: `self.log("accuracy", right, len(grain))` in `loss`, `after_step` and so on.

Sums and weights of all grains and ranks since the last log line are added, then divided once; nothing is read from the
device before something is logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import TaskContract
from paceline.observe.records import STEP_KEYS
from paceline.world.link import Link

Row = tuple[str, Any, Any]
"""A number as it was logged: name, sum, weight."""


class Scalars:
    """Sums and weights by name since the last log line.

    Each is kept by itself until then, and all are added at once, correctly rounded: the result is the same on any
    number of ranks.
    """

    def __init__(self, link: Link, is_used: bool, is_counted: Callable[[], bool]) -> None:
        """`is_used` is the same on all ranks; `is_counted` tells if what is computed now belongs to training."""
        self._link, self._is_used, self._is_counted = link, is_used or not link.has_group, is_counted
        self._rows: list[Row] = []
        self._collected: list[Row] | None = None

    def add(self, name: str, total: Any, weight: Any) -> None:
        """Add a sum and its weight; numbers, or tensors with one element."""
        if self._collected is not None:
            self._collected.append((name, _number(total), _number(weight)))
            return
        if not self._is_counted():
            return
        if name in STEP_KEYS:
            raise TaskContract(
                f"`self.log({name!r}, ...)`: every step has a number of this name already",
                hint=f"choose another name, such as 'train_{name}'",
            )
        if not self._is_used:
            raise TaskContract(
                f"`self.log({name!r}, ...)` is called by code outside of the task's class, so other ranks do not wait "
                "for it",
                hint="call `self.log` in a method of the task",
            )
        self._rows.append((name, _number(total), _number(weight)))

    @contextmanager
    def collecting(self) -> Iterator[list[Row]]:
        """Numbers that are logged in here go into the list alone: a CUDA graph writes them anew with each replay."""
        before, self._collected = self._collected, []
        try:
            yield self._collected
        finally:
            self._collected = before

    def add_all(self, rows: Iterable[Row]) -> None:
        """Add what was collected."""
        for row in rows:
            self.add(*row)

    def clear(self) -> None:
        """Forget what was added, as by steps that were only measured."""
        self._rows = []

    def read(self) -> dict[str, float]:
        """Return the quotients over all ranks, and start anew. All ranks must call it."""
        if not self._is_used:
            return {}
        names = [name for name, _, _ in self._rows]
        numbers = iter(_on_host([number for _, *pair in self._rows for number in pair]))
        self._rows = []
        own = [(name, next(numbers), next(numbers)) for name in names]
        rows = self._link.gather_objects(own) if self._link.has_group else [own]
        by_name: dict[str, list[tuple[float, float]]] = {}
        for name, total, weight in (row for of_rank in rows for row in of_rank):
            by_name.setdefault(name, []).append((total, weight))
        return {name: _quotient(pairs) for name, pairs in by_name.items()}


def _number(value: Any) -> Any:
    return value.detach().to(torch.float64).sum() if isinstance(value, Tensor) else float(value)


def _on_host(numbers: Sequence[Any]) -> list[float]:
    """Return numbers of which some are on the device, in one transfer."""
    waiting = [number for number in numbers if isinstance(number, Tensor)]
    there = iter(torch.stack([number.to(waiting[0].device) for number in waiting]).tolist() if waiting else ())
    return [next(there) if isinstance(number, Tensor) else number for number in numbers]


def _quotient(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the sum of sums over that of weights; each is rounded once, so that their order does not matter."""
    try:
        total, weight = (math.fsum(numbers) for numbers in zip(*pairs, strict=True))
    except (OverflowError, ValueError):  # inf and -inf, or beyond all numbers
        return math.nan
    return total / weight if weight else math.nan


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
