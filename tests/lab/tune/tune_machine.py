"""A machine made of numbers, for the search of `paceline tune`: trials by a formula, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.lab.tune.search import Changes, Failure, Knob, SearchResult, Speed, Trial, ratios_of, search
from paceline.speed.autotune.proof import is_decided

TRIAL_S = 5.0


class Machine:
    """Trials by a formula, on a clock of its own."""

    def __init__(self, speed: Callable[[Mapping[str, Any], int], float | Failure], budget_s: float = 1e4) -> None:
        self._speed, self.spent_s, self._budget_s = speed, 0.0, budget_s
        self.log: list[dict[str, Any]] = []
        self.num_races = 0

    def measure(self, changes: Changes, limit_s: float) -> Trial:
        self.log.append(dict(changes))
        found = self._speed(changes, len(self.log))
        self.spent_s += min(TRIAL_S, limit_s)
        if isinstance(found, Failure):
            return Trial(changes, found, TRIAL_S)
        return Trial(changes, Speed(found, 0.01, 1 << 30), TRIAL_S)

    def left_s(self) -> float:
        return self._budget_s - self.spent_s

    def race(self, first: Trial, second: Trial, limit_s: float) -> list[tuple[Trial, Trial]]:
        """Side by side: the machine is as slow for one as for the other."""
        self.spent_s += min(2 * TRIAL_S, limit_s)
        pairs: list[tuple[Trial, Trial]] = []
        self.num_races += 1
        while not is_decided(ratios_of(pairs)):
            number = len(pairs)
            speeds = [self._speed(trial.changes, number) for trial in (first, second)]
            one, other = [
                Trial(trial.changes, Speed(speed), TRIAL_S)
                for trial, speed in zip((first, second), speeds, strict=True)
                if isinstance(speed, float)
            ]
            pairs.append((one, other))
        return pairs

    def search(self, *to_try: Knob, side_by_side: bool = False) -> SearchResult:
        race = self.race if side_by_side else None
        return search(self.measure({}, 1e9), to_try, self.measure, self.left_s, race)


def knob(name: str, *ways: tuple[Any, ...], gain: float = 0.1) -> Knob:
    return Knob(name, tuple(tuple({name: value} for value in way) for way in ways), gain)


WORKERS = knob("workers", (1, 2, 4, 8), gain=0.3)
LEVEL = knob("level", (2,), (3,), gain=0.5)
GRAINS = knob("grains", (2, 1), (8, 16), gain=0.1)


def formula(changes: Mapping[str, Any], number: int) -> float:
    """Fastest: level 3, 4 workers, 8 grains."""
    level = {0: 1.0, 2: 1.4, 3: 1.7}[changes.get("level", 0)]
    workers = {0: 1.0, 1: 1.2, 2: 1.5, 4: 1.6, 8: 1.3}[changes.get("workers", 0)]
    grains = {1: 0.7, 2: 0.9, 4: 1.0, 8: 1.1, 16: 0.8}[changes.get("grains", 4)]
    return 100 * level * workers * grains
