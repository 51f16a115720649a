"""What an epoch has come to so far. It travels in checkpoints, so that a resumed run's record is of the whole epoch.

Only steps that count are in it: what a run did after its last checkpoint, and does again, is not. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.observe.callback import Record
from paceline.observe.device_clock import apportion
from paceline.observe.epoch_record import RankEpoch, Units, epoch_numbers

_SUMMED = ("seconds", "between", "num_samples", "count", "length", "work", "core_wait_s")
WHOLE = ("samples", "objects_per_s", "core_wait", "work", "computing", "seconds", "between", "rates")
"""Numbers of a record that are of the whole epoch; the others are of the last launch, whose machine they describe."""


class Mean:
    """Of the finite ones of many numbers, rounded once: the same however they came in pieces."""

    def __init__(self, parts: Iterable[float] = (), number: int = 0) -> None:
        self._parts, self.number = list(parts), number

    def add(self, numbers: Iterable[float]) -> None:
        finite = [number for number in numbers if math.isfinite(number)]
        self._parts += finite
        self.number += len(finite)

    @property
    def value(self) -> float:
        return math.fsum(self._parts) / self.number if self.number else math.nan

    @property
    def parts(self) -> list[float]:
        """A few numbers with the same sum, exactly: each is what rounding the ones before it has left."""
        few: list[float] = []
        while rest := math.fsum([*self._parts, *(-part for part in few)]):
            few.append(rest)
        self._parts = few
        return list(few)


@dataclass(frozen=True)
class EpochSums:
    """The steps of an epoch that were done, by one launch after another."""

    steps: int = 0
    losses: tuple[float, ...] = ()
    """`Mean.parts` of them."""
    num_losses: int = 0
    """Finite ones."""
    skipped: int = 0
    ranks: tuple[RankEpoch, ...] = ()
    """Of the last launch, with what was before."""

    def state(self) -> dict[str, Any]:
        """Plain values."""
        ranks = [{name: getattr(rank, name) for name in _SUMMED} for rank in self.ranks]
        own = {"steps": self.steps, "losses": list(self.losses), "num_losses": self.num_losses}
        return {**own, "skipped": self.skipped, "ranks": ranks}

    @classmethod
    def load(cls, state: Mapping[str, Any] | None) -> EpochSums:
        """The counterpart of `state`; a checkpoint that is older than these sums has none."""
        if not state:
            return cls()
        ranks = tuple(RankEpoch(**rank) for rank in state["ranks"])
        return cls(state["steps"], tuple(state["losses"]), state["num_losses"], state["skipped"], ranks)


def added(earlier: Sequence[RankEpoch], ranks: Sequence[RankEpoch]) -> list[RankEpoch]:
    """What the ranks of this launch have measured, with what those of the launches before had.

    Another number of ranks shares out what was before: time as its mean, so that it lasts as long, all else as its sum.
    """
    own = [replace(rank, seconds=_divided(rank), device=None, waits=[]) for rank in ranks]
    if not earlier:
        return own
    before = earlier if len(earlier) == len(own) else _shared_out(earlier, len(own))
    return [
        replace(
            rank,
            seconds=_sum([then.seconds, rank.seconds]),
            between=_sum([then.between, rank.between]),
            num_samples=then.num_samples + rank.num_samples,
            count=then.count + rank.count,
            length=_known([then.length, rank.length]),
            work=then.work + rank.work,
            core_wait_s=_known([then.core_wait_s, rank.core_wait_s]),
        )
        for then, rank in zip(before, own, strict=True)
    ]


def whole(ranks: Sequence[RankEpoch], units: Units) -> Record:
    """Of a record, what is of the whole epoch."""
    numbers = epoch_numbers(ranks, units)
    return {name: numbers[name] for name in WHOLE}


def _shared_out(ranks: Sequence[RankEpoch], number: int) -> list[RankEpoch]:
    times = _mean([rank.seconds for rank in ranks]), _mean([rank.between for rank in ranks])
    waited, length = _known([rank.core_wait_s for rank in ranks]), _known([rank.length for rank in ranks])
    each = RankEpoch(
        *times,
        num_samples=0,
        length=None if length is None else 0.0,
        work=sum(rank.work for rank in ranks) / number,
        core_wait_s=None if waited is None else waited / len(ranks),
    )
    # Whose these are is in no record: whole numbers stay whole.
    num_samples, count = sum(rank.num_samples for rank in ranks), sum(rank.count for rank in ranks)
    first = replace(each, num_samples=num_samples, count=count, length=length)
    return [first, *[each] * (number - 1)]


def _divided(rank: RankEpoch) -> dict[str, float]:
    return rank.seconds if rank.device is None else apportion(rank.seconds, rank.device)


def _known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _sum(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: sum(row.get(phase, 0.0) for row in rows) for row in rows for phase in row}


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: value / len(rows) for phase, value in _sum(rows).items()}
