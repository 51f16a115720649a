"""When ranks that step apart come together: pure decisions, the same on every rank because their inputs are."""

from __future__ import annotations

from collections.abc import Sequence

GROWTH = 8
"""How many times longer than the last an interval may be: a first step that took no time says little."""


def first_interval(sync_step: int | None) -> int:
    """Steps before the first average. By seconds it is one step, because nobody knows yet how long that takes."""
    return sync_step or 1


def next_interval(sync_step: int | None, sync_seconds: float | None, steps: int, seconds: Sequence[float]) -> int:
    """Steps until the next average, when each rank needed so many `seconds` for the last `steps` steps.

    By seconds: as many as the slowest rank does in that time.
    """
    if sync_seconds is None:
        assert sync_step is not None
        return sync_step
    slowest_s = max(seconds) / steps
    most = GROWTH * steps
    return max(1, most if slowest_s * most <= sync_seconds else int(sync_seconds / slowest_s))
