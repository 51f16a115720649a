"""The search of `paceline tune`: from measurements to the fastest settings, one knob after the other.

It only decides: `measure` runs a trial, `run_race` runs two side by side, `left_s` gives what is left of the budget.
Noise must not pick:

- a value that looks faster races what it would replace, in turns, and must be ahead by more than luck explains (see
  proof.py);
- the best settings then race the default in the same way. If they do not win, the default does.

Where two trials do not fit into memory side by side, they are run one after the other, and all rounds must be won.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.speed.autotune.proof import FEW, is_ahead, is_decided, is_faster
from paceline.speed.autotune.race import race

MARGIN = 0.02
"""A gain below this share is not worth a setting."""
RACE_COST = 1.5
"""Time that a race takes, in trials of both: it starts each of them once."""
MOST_ROUNDS, LEAST_ROUNDS = 3, 2
"""Rounds of trials one after the other."""
FINAL_SHARE = 0.4
"""Of the time left after the default was measured: what is kept for the race against it."""

Changes = Mapping[str, Any]
"""Settings that differ from the default."""
FailureKind = Literal["memory", "killed", "time", "refused", "failed"]


@dataclass(frozen=True)
class Speed:
    """Measurement of one trial."""

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
    """Reason for which a trial measured nothing."""

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
    paths: tuple[tuple[Changes, ...], ...]
    """Each leads on from the default, value by value, and is left where a value is no better than the last."""
    gain: float
    """Share of the time that it may save, as far as the default's measurement tells. Larger ones come first."""


@dataclass(frozen=True)
class Race:
    """Two settings, measured in turns."""

    first: Changes
    second: Changes
    ratios: tuple[float, ...]
    """Speed of the second over the first's, round by round."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search."""

    trials: tuple[Trial, ...]
    """Each alone on the machine."""
    base: Changes
    """The settings that others are compared with: nothing changed, unless the default does not fit into memory."""
    winner: Changes
    rounds: tuple[float, ...] = ()
    """Speed of the winner, or of what came nearest to winning, over the default's, in each round of the final."""
    rival: Changes = field(default_factory=dict)
    """Settings of the final, where there was one."""
    untried: tuple[str, ...] = ()
    """Knobs for which there was no time."""
    races: tuple[Race, ...] = ()
    """All races, the final included."""

    @property
    def default_wins(self) -> bool:
        return dict(self.winner) == dict(self.base)


Measure = Callable[[Changes, float], Trial]
"""Tries settings, for at most this many seconds."""
Pairs = Sequence[tuple[Trial, Trial]]
"""Rounds of two settings."""
RunRace = Callable[[Trial, Trial, float], Pairs]
"""Runs two settings side by side, for at most this many seconds; no pairs where that is not possible."""


def ratios_of(pairs: Pairs) -> list[float]:
    return [second.samples_per_s / first.samples_per_s for first, second in pairs]


def budget_for(spent_s: float, trial_s: float, knobs: Sequence[Knob]) -> float:
    """Return about how many seconds a search needs that also tries these knobs: each of their values, and a race."""
    values = sum(len(path) for knob in knobs for path in knob.paths)
    needed = spent_s + trial_s * (values + 2 * RACE_COST * len(knobs))
    return 10.0 * math.ceil(needed / 10)


def search(
    default: Trial,
    knobs: Sequence[Knob],
    measure: Measure,
    left_s: Callable[[], float],
    run_race: RunRace | None = None,
) -> SearchResult:
    """Search coordinate by coordinate from `default`, which was measured and fits; then hold the final."""
    climb = _Climb(default, measure, left_s, run_race)
    untried = []
    for knob in sorted(knobs, key=lambda knob: -knob.gain):
        if not climb.turn(knob):
            untried.append(knob.name)
    return climb.finish(tuple(untried))


def make_fit(
    default: Trial, finer: Sequence[Changes], measure: Measure, left_s: Callable[[], float]
) -> tuple[Trial | None, list[Trial]]:
    """Return the first of settings of ever less memory that fits, if any does, and all that were tried."""
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
    """State of a search: the best settings so far, and their newest measurement."""

    def __init__(self, default: Trial, measure: Measure, left_s: Callable[[], float], run_race: RunRace | None) -> None:
        assert isinstance(default.outcome, Speed)
        self._base, self._measure, self._left_s, self._run_race = default, measure, left_s, run_race
        round_s = 2 * default.wall_s
        self._final_s = min(MOST_ROUNDS * round_s, max(LEAST_ROUNDS * round_s, FINAL_SHARE * left_s()))
        if run_race is not None:
            self._final_s = RACE_COST * round_s
        self._raced: tuple[Changes, Changes, Pairs] | None = None
        """The settings of the last race, and its rounds."""
        self.best = default
        self.trials = [default]
        self.races: list[Race] = []

    def turn(self, knob: Knob) -> bool:
        """Try a knob's values; return True if there was time for at least one."""
        # Compare with the slowest measurement of the best so far: the race will tell whether a value is faster.
        slowest = min(trial.samples_per_s for trial in (self.best, *self._alone(self.best.changes)))
        current = best = dataclasses.replace(self.best, outcome=_at(self.best.outcome, slowest))
        has_tried = False
        for path in knob.paths:
            last = current
            for value in path:
                if not self._has_time(last):
                    break
                has_tried = True
                trial = self._try({**current.changes, **value})
                if trial.samples_per_s <= last.samples_per_s * (1 + MARGIN):
                    break
                last = trial
            if last.samples_per_s > best.samples_per_s:
                best = last
        if best is not current:
            current = self.best
            self.best = self._confirmed(current, best) if self._has_time(current, best) else best  # the final will tell
        return has_tried

    def _confirmed(self, current: Trial, best: Trial) -> Trial:
        """Return whichever is faster when both are measured again."""
        pairs = self._race(current, best, self._limit_s(), rounds=1)
        ratios = ratios_of(pairs)
        if is_faster(ratios, MARGIN):
            return _middle([second for _, second in pairs])
        return _middle([first for first, _ in pairs]) if pairs else current

    def finish(self, untried: tuple[str, ...]) -> SearchResult:
        base, rival = self._base, self.best
        if rival.changes == base.changes:
            return SearchResult(
                tuple(self.trials), base.changes, base.changes, untried=untried, races=tuple(self.races)
            )
        if self._raced is not None and self._raced[:2] == (base.changes, rival.changes):
            pairs = self._raced[2]  # only one knob was worth turning: this race has been
        else:
            pairs = self._race(base, rival, self._left_s(), rounds=MOST_ROUNDS)
        ratios = ratios_of(pairs)
        wins = len(ratios) >= LEAST_ROUNDS and is_ahead(ratios)
        winner = rival.changes if wins else base.changes
        return SearchResult(
            tuple(self.trials), base.changes, winner, tuple(ratios), rival.changes, untried, tuple(self.races)
        )

    def _race(self, first: Trial, second: Trial, limit_s: float, rounds: int) -> Pairs:
        pairs = self._rounds(first, second, limit_s, rounds)
        if pairs:
            self.races.append(Race(first.changes, second.changes, tuple(ratios_of(pairs))))
        return pairs

    def _rounds(self, first: Trial, second: Trial, limit_s: float, rounds: int) -> Pairs:
        """Measure both again, side by side; or in turns, the second first: it was measured last."""
        before_s = self._left_s()
        pairs = [] if self._run_race is None else list(self._run_race(first, second, limit_s))
        if len(pairs) >= FEW or is_decided(ratios_of(pairs)):
            self._raced = (first.changes, second.changes, pairs)
            self._final_s = max(self._final_s, before_s - self._left_s())  # a race to come takes as long
            return pairs

        def is_over(done: Sequence[tuple[Trial, ...]]) -> bool:
            return len(done) == rounds or self._left_s() < first.wall_s + second.wall_s

        def runner(entrant: Trial) -> Callable[[int], Trial | None]:
            def run(number: int) -> Trial | None:
                trial = self._try(entrant.changes)
                return trial if trial.samples_per_s else None

            return run

        return [(one, other) for other, one in race([runner(second), runner(first)], is_over)]

    def _alone(self, changes: Changes) -> list[Trial]:
        return [trial for trial in self.trials if trial.changes == changes and isinstance(trial.outcome, Speed)]

    def _has_time(self, *trials: Trial) -> bool:
        return self._left_s() - self._final_s >= sum(trial.wall_s for trial in trials)

    def _limit_s(self) -> float:
        """Return the limit of one trial: a compilation may take long, but not all the time that others need."""
        left = max(0.0, self._left_s())
        return min(left, max(3 * self._base.wall_s, (left - self._final_s) / 2))

    def _try(self, changes: Changes) -> Trial:
        trial = self._measure(changes, self._limit_s())
        self.trials.append(trial)
        return trial


def _at(outcome: Speed | Failure, samples_per_s: float) -> Speed:
    assert isinstance(outcome, Speed)
    return dataclasses.replace(outcome, samples_per_s=samples_per_s)


def _middle(trials: Sequence[Trial]) -> Trial:
    """Join rounds of one setting into one trial."""
    return Trial(trials[0].changes, speed_of(trials), trials[0].wall_s)


def speed_of(trials: Sequence[Trial]) -> Speed | Failure:
    """Join trials of one setting: medians, and the largest spread and memory."""
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
