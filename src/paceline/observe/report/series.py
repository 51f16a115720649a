"""Thinning and smoothing of curves, for a page of limited size. Pure functions on numbers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.typed_json import is_number

MOST_POINTS = 2000
"""Points of one curve: more than a screen has columns."""


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Return the places of the points to keep: the lowest and highest of each of equal stretches, and both ends.

    Every spike stays, which keeping each n-th point would lose. A gap (None) stays where it is a whole stretch.
    """
    number = len(values)
    if number <= most:
        return list(range(number))
    places = {0, number - 1}
    stretches = max(1, most // 2 - 1)
    for stretch in range(stretches):
        first, last = number * stretch // stretches, number * (stretch + 1) // stretches
        known = [(value, place) for place, value in enumerate(values[first:last], first) if value is not None]
        if known:
            places.update((min(known)[1], max(known)[1]))
        else:
            places.add(first)
    return sorted(places)


def smooth(values: Sequence[float | None], half_life: float) -> list[float | None]:
    """Average the values before and after each, with weights that halve every `half_life` places; gaps stay gaps.

    Both sides count alike, so a jump is where it was: what only looks back comes too late. The values at the ends are
    not pulled towards 0: a sum is divided by the sum of its weights.
    """
    keep = 0.5 ** (1 / max(half_life, 1e-9))
    known = [value for value in values if value is not None]
    ahead, back = _decayed(known, keep), _decayed(known[::-1], keep)[::-1]
    # A value is in the sum of either side: once too often.
    means = [
        (before[0] + after[0] - value) / (before[1] + after[1] - 1)
        for value, before, after in zip(known, ahead, back, strict=True)
    ]
    left = iter(means)
    return [None if value is None else next(left) for value in values]


def _decayed(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """Return at each place the sum of the values so far, and of their weights."""
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        sums.append((total, weight))
    return sums


def short(value: float | None, digits: int = 5) -> float | None:
    """Round to five digits, enough for the eye; None for what is not finite, which JSON cannot hold."""
    return float(f"{value:.{digits}g}") if is_number(value) else None
