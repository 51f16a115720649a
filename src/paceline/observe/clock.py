"""Where the time of a run goes: every moment between two laps belongs to exactly one named phase."""

from __future__ import annotations

from time import perf_counter_ns

PHASES = ("setup", "data", "compute", "communication", "checkpoint", "validation", "other")


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


def computing_share(seconds: dict[str, float]) -> float:
    """RETURNN's computing time: the share of the time in which the run was not waiting for data."""
    total = sum(seconds.values())
    return 1.0 - seconds["data"] / total if total else 1.0
