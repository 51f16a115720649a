"""Predicted speed by number of ranks, with intervals, and advice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.train.predict.calibration import Calibration, Manner
from paceline.train.predict.links import LinkSpeed


@dataclass(frozen=True)
class Range:
    """A predicted number with the interval that it should be in nine times out of ten."""

    low: float
    value: float
    high: float


@dataclass(frozen=True)
class Row:
    """Prediction for one number of ranks. Parts of a step are means over the ranks and add up to `step_s`."""

    ranks: int
    nodes: int
    grains_per_rank: int
    """Of the rank that has most."""
    step_s: Range
    compute_s: float
    communication_s: float
    """Exposed: that no computing hides."""
    waiting_s: float
    """For the slowest rank: more grains, longer ones, or a slower machine."""
    data_s: float
    other_s: float
    """Update, logging and what else a step needs."""
    samples_per_s: Range
    speedup: Range
    """Over one rank."""
    efficiency: Range
    """Speed-up per rank."""
    run_s: Range | None
    """Until the end of the run, where its length is known; with failures, if they are asked for."""
    goodput: Range | None
    """Share of the time that is not lost to failures, recovery and checkpoints."""
    price: Range | None


@dataclass(frozen=True)
class Prediction:
    """Answer of `paceline predict`."""

    rows: Sequence[Row]
    staircase: Sequence[tuple[int, int]]
    """(ranks, grains of the busiest rank) wherever more ranks change it."""
    advice: Sequence[str]
    """Where it stops paying, and what to change."""
    assumptions: Sequence[str]
    unknown: Sequence[str]
    """Influences that it cannot know."""
    manner: Manner

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError


def predict(
    calibration: Calibration,
    *,
    ranks: Sequence[int],
    nodes: Sequence[int] | None = None,
    between: LinkSpeed,
    inside: LinkSpeed | None = None,
    manner: Manner | None = None,
    grains: int | None = None,
    price: float | None = None,
    seed: int = 0,
) -> Prediction:
    """Return the prediction; `between` links machines, `inside` the ranks of one (as measured if not set).

    `nodes` has the machines of each number of ranks; each rank is on a machine of its own if not set.
    """
    raise NotImplementedError
