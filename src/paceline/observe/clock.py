"""Where the time of a run goes: every moment between two laps belongs to exactly one named phase."""

from __future__ import annotations

from time import perf_counter_ns

PHASES = ("setup", "data", "compute", "communication", "logging", "checkpoint", "validation", "other")
"""`other` is what no phase has claimed; everything in a run is meant to have a name."""


class Clock:
    """A stopwatch that never stops: `lap(phase)` books the time since the last lap on `phase`."""

    def __init__(self) -> None:
        self._ns = dict.fromkeys(PHASES, 0)
        self._last = perf_counter_ns()

    def lap(self, phase: str) -> None:
        now = perf_counter_ns()
        self._ns[phase] += now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds per phase since the clock was made."""
        return {phase: ns * 1e-9 for phase, ns in self._ns.items()}


def elapsed(earlier: dict[str, float], later: dict[str, float]) -> dict[str, float]:
    """Seconds per phase between two readings."""
    return {phase: later[phase] - earlier[phase] for phase in later}


def computing_share(*seconds: dict[str, float]) -> float:
    """RETURNN's computing time: the share of all ranks' time in which they were not waiting for data."""
    total = sum(sum(rank.values()) for rank in seconds)
    return 1.0 - sum(rank["data"] for rank in seconds) / total if total else 1.0
