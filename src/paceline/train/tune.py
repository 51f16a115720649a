"""The search of `paceline tune`: from measurements to the fastest settings, one knob after the other.

It decides only; `measure` runs a trial and `left_s` says how much of the budget is left. Noise must not pick:

- a value that looks faster is measured once more, next to what it would replace, and must be faster both times;
- the winner then races the default, back and forth, and must be ahead in every round. Else the default wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MARGIN = 0.02
"""A gain below this share is not worth a setting."""
MOST_ROUNDS = 3
LEAST_ROUNDS = 2
"""Rounds against the default that a winner needs."""
FINAL_SHARE = 0.4
"""Of the time left after the default was measured: what is kept for these rounds at most."""

Changes = Mapping[str, Any]
"""Settings that differ from the default."""
FailureKind = Literal["memory", "killed", "time", "refused", "failed"]


@dataclass(frozen=True)
class Speed:
    """What one trial measured."""

    samples_per_s: float
    spread: float = 0.0
    """Standard deviation of the parts of a trial, relative to its speed."""
    memory_bytes: int = 0
    """Peak of the rank that needed most: of the device, or of the process on a CPU."""
    data_share: float = 0.0
    """Share of the time in which ranks waited for data."""
    workers: int = 0
    """Loader processes per rank, as it turned out."""


@dataclass(frozen=True)
class Failure:
    """Why a trial measured nothing."""

    kind: FailureKind
    what: str = ""

    @property
    def is_memory(self) -> bool:
        return self.kind in ("memory", "killed")


@dataclass(frozen=True)
class Trial:
    """One setting, tried once."""

    changes: Changes
    outcome: Speed | Failure
    wall_s: float
    """All of it: start of the processes, warm-up, measurement."""

    @property
    def samples_per_s(self) -> float:
        return self.outcome.samples_per_s if isinstance(self.outcome, Speed) else 0.0


@dataclass(frozen=True)
class Knob:
    """A setting, or some that belong together, and what to try for it."""

    name: str
    ways: tuple[tuple[Changes, ...], ...]
    """Each way leads on from the default, value by value, and is left where a value is no better than the last."""
    gain: float
    """Share of the time that it may save, as far as the default's measurement tells. Larger ones come first."""
    applies: Callable[[Changes], bool] = lambda changes: True
    """Whether it has an effect beside what was chosen so far."""


@dataclass(frozen=True)
class Found:
    """What came out of a search."""

    trials: tuple[Trial, ...]
    base: Changes
    """What the others are compared with: nothing changed, unless the default does not fit into memory."""
    winner: Changes
    rounds: tuple[float, ...] = ()
    """Speed of the winner, or of what came nearest to winning, over the default's, in each round of the final."""
    rival: Changes = field(default_factory=dict)
    """What was in the final."""
    untried: tuple[str, ...] = ()
    """Knobs for which there was no time."""

    @property
    def default_wins(self) -> bool:
        return dict(self.winner) == dict(self.base)


Measure = Callable[[Changes, float], Trial]
"""Try settings, for so many seconds at most."""


def search(default: Trial, knobs: Sequence[Knob], measure: Measure, left_s: Callable[[], float]) -> Found:
    """Coordinate by coordinate from `default`, which was measured and fits, then the final."""
    climb = _Climb(default, measure, left_s)
    untried = []
    for knob in sorted(knobs, key=lambda knob: -knob.gain):
        if knob.applies(climb.best.changes) and not climb.turn(knob):
            untried.append(knob.name)
    return climb.finish(tuple(untried))


def make_fit(
    default: Trial, finer: Sequence[Changes], measure: Measure, left_s: Callable[[], float]
) -> tuple[Trial | None, list[Trial]]:
    """The first of some settings of ever less memory that fits, where the default does not; and all that were tried."""
    tried = [default]
    for changes in finer:
        if left_s() <= 0:
            break
        tried.append(measure(changes, left_s()))
        outcome = tried[-1].outcome
        if isinstance(outcome, Speed):
            return tried[-1], tried
        if not outcome.is_memory:
            break
    return None, tried


class _Climb:
    """Where a search is: the best so far, and its newest measurement."""

    def __init__(self, default: Trial, measure: Measure, left_s: Callable[[], float]) -> None:
        assert isinstance(default.outcome, Speed)
        self._base, self._measure, self._left_s = default, measure, left_s
        round_s = 2 * default.wall_s
        self._final_s = min(MOST_ROUNDS * round_s, max(LEAST_ROUNDS * round_s, FINAL_SHARE * left_s()))
        self.best = default
        self.trials = [default]

    def turn(self, knob: Knob) -> bool:
        """Try a knob's values; whether there was time for at least one."""
        here, best, has_tried = self.best, self.best, False
        for way in knob.ways:
            last = here
            for value in way:
                if not self._has_time(last):
                    break
                has_tried = True
                trial = self._try({**here.changes, **value})
                if trial.samples_per_s <= last.samples_per_s * (1 + MARGIN):
                    break
                last = trial
            if last.samples_per_s > best.samples_per_s:
                best = last
        if best is not here:
            self.best = self._confirmed(here, best) if self._has_time(here, best) else best  # the final will tell
        return has_tried

    def _confirmed(self, here: Trial, best: Trial) -> Trial:
        """Both again, the other way round than before: what was first is now second."""
        again, before = self._try(best.changes), self._try(here.changes)
        if not (again.samples_per_s and before.samples_per_s):
            return here
        return again if again.samples_per_s > before.samples_per_s * (1 + MARGIN) else before

    def finish(self, untried: tuple[str, ...]) -> Found:
        base, rival = self._base.changes, self.best.changes
        if rival == base:
            return Found(tuple(self.trials), base, base, untried=untried)
        ratios: list[float] = []
        for number in range(MOST_ROUNDS):
            if self._left_s() < self._base.wall_s + self.best.wall_s:
                break
            pair = {name: self._try(changes) for name, changes in _order(number, base, rival)}
            if not all(trial.samples_per_s for trial in pair.values()):
                break
            ratios.append(pair["rival"].samples_per_s / pair["base"].samples_per_s)
        wins = len(ratios) >= LEAST_ROUNDS and min(ratios) > 1
        return Found(tuple(self.trials), base, rival if wins else base, tuple(ratios), rival, untried)

    def _has_time(self, *trials: Trial) -> bool:
        return self._left_s() - self._final_s >= sum(trial.wall_s for trial in trials)

    def _try(self, changes: Changes) -> Trial:
        left = max(0.0, self._left_s())
        # A first compilation may take long, but not all the time that the others need.
        limit_s = min(left, max(3 * self._base.wall_s, (left - self._final_s) / 2))
        trial = self._measure(changes, limit_s)
        self.trials.append(trial)
        return trial


def _order(number: int, base: Changes, rival: Changes) -> list[tuple[str, Changes]]:
    """The default first, then the rival first, and so on: who drifts with the machine gains nothing."""
    pair = [("base", base), ("rival", rival)]
    return pair if number % 2 == 0 else pair[::-1]


def speed_of(trials: Sequence[Trial]) -> Speed | Failure:
    """All trials of one setting as one: medians, and the largest spread and memory."""
    speeds = [trial.outcome for trial in trials if isinstance(trial.outcome, Speed)]
    if not speeds:
        return trials[-1].outcome
    middle = statistics.median(speed.samples_per_s for speed in speeds)
    rates = [speed.samples_per_s for speed in speeds]
    between = (max(rates) - min(rates)) / 2 / middle
    return Speed(
        middle,
        max(between, *(speed.spread for speed in speeds)) if len(speeds) > 1 else speeds[0].spread,
        max(speed.memory_bytes for speed in speeds),
        statistics.median(speed.data_share for speed in speeds),
        speeds[-1].workers,
    )
