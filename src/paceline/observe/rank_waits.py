"""When ranks meet: how long moving numbers takes, and for whom the others wait.

The rank that comes last to a meeting waits for nobody: its wait is what the exchange itself takes. What the others
wait beyond that, they wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_KEPT = 1024


class Thinned:
    """Some of many numbers, evenly spread: of the same places on every rank that was given equally many."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        assert most % 2 == 0, "every second one is dropped when it is full"
        self._most = most
        self.clear()

    def clear(self) -> None:
        self.kept: list[float] = []
        self._seen, self._stride = 0, 1

    def add(self, number: float) -> None:
        if self._seen % self._stride == 0:
            self.kept.append(number)
            if len(self.kept) == self._most:
                self.kept, self._stride = self.kept[::2], 2 * self._stride
        self._seen += 1


@dataclass(frozen=True)
class Meetings:
    """What ranks did with the time that they spent on each other."""

    exchange: float
    """Share of all communication time in which numbers moved; the rest was waiting for the last rank."""
    last: tuple[float, ...]
    """By rank: share of the meetings to which it came last."""
    waited_for: tuple[float, ...]
    """By rank: share of all communication time in which the others waited for it."""


def meetings(waits: Sequence[Sequence[float]]) -> Meetings | None:
    """From each rank's seconds at the same meetings; None where there were none, or only one rank."""
    together = list(zip(*waits, strict=False))  # a rank that failed to measure its last one has it no more
    total = sum(sum(each) for each in together)
    if len(waits) < 2 or not total:
        return None
    exchange = sum(min(each) * len(each) for each in together)
    last, waited_for = [0] * len(waits), [0.0] * len(waits)
    for each in together:
        rank = each.index(min(each))
        last[rank] += 1
        waited_for[rank] += sum(each) - min(each) * len(each)
    return Meetings(
        exchange / total,
        tuple(times / len(together) for times in last),
        tuple(seconds / total for seconds in waited_for),
    )
