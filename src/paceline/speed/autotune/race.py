"""The race: candidates are measured in turns, round by round, so that whatever else the machine does hits all alike.

Every autotuner of this library ends in one: `-O4` with copies of the model in one process, `paceline tune` with trials
in processes of their own. What the rounds prove is judged in proof.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

FEWEST_ROUNDS = 3
ROUNDS = 7
ENOUGH_S = 2.0
"""No further round begins after this many seconds of them, once there are `FEWEST_ROUNDS`."""

Measured = TypeVar("Measured")
Runner = Callable[[int], Measured | None]
"""Measures one round, by its number; None if it cannot run any more."""
Rounds = Sequence[tuple[Measured, ...]]
"""One measurement of every runner in each round."""


def race(runners: Sequence[Runner[Measured]], is_over: Callable[[Rounds[Measured]], bool]) -> Rounds[Measured]:
    """Return the rounds that were run until `is_over(rounds)`, or until a runner dropped out.

    The order alternates: the last runner of a round is the first of the next.
    """
    rounds: list[tuple[Measured, ...]] = []
    places = range(len(runners))
    while not is_over(rounds):
        measured: dict[int, Measured] = {}
        for place in places if len(rounds) % 2 == 0 else reversed(places):
            value = runners[place](len(rounds))
            if value is None:
                return rounds
            measured[place] = value
        rounds.append(tuple(measured[place] for place in places))
    return rounds


def is_enough(rounds: Rounds[float], limit_s: float = float("inf")) -> bool:
    """Return True if rounds of seconds suffice for medians: one disturbed round must not decide.

    Runners of which every round took longer than `limit_s` are not timed further.
    """
    seconds = [statistics.fmean(each) for each in rounds]
    if len(seconds) < FEWEST_ROUNDS:
        return False
    return len(seconds) >= ROUNDS or sum(seconds) >= ENOUGH_S or min(seconds) > limit_s


def medians(rounds: Rounds[float]) -> list[float]:
    """Return the median of each runner."""
    return [statistics.median(each) for each in zip(*rounds, strict=True)]
