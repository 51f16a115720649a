"""Clock of a run: every moment between two laps belongs to exactly one named phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Generic, TypeVar

PHASES = (
    "setup",
    "data",
    "transfer",
    "compute",
    "communication",
    "optimizer",
    "logging",
    "checkpoint",
    "validation",
    "other",
)
"""`data` is waiting for it, `transfer` bringing it to the device, `compute` forward and backward, `communication`
waiting for other ranks; `other` is what no phase has claimed: everything in a run is meant to have a name."""

MOST_WAITS = 1024
"""Waits of an epoch that are kept."""
MOST_STEPS = 128
"""Steps of an epoch whose phases are kept."""
STEP_COLUMNS = ("data", "transfer", "compute", "communication", "optimizer", "other", "logging")
"""Phases of a step that is kept; the last two are one number. What happens between steps is none of them."""
T = TypeVar("T")


class Thinned(Generic[T]):
    """Some of many numbers, evenly spread. Ranks that add equally many keep those of the same places."""

    def __init__(self, most: int = MOST_WAITS) -> None:
        assert most % 2 == 0, "every second one is dropped when it is full"
        self._most = most
        self.clear()

    def clear(self) -> None:
        self.numbers: list[T] = []
        self._num_added, self._stride = 0, 1

    @property
    def takes_next(self) -> bool:
        """True if the next number is one of those that are kept."""
        return self._num_added % self._stride == 0

    def skip(self) -> None:
        """Count a number that is not kept."""
        self._num_added += 1

    def add(self, number: T) -> None:
        if self._num_added % self._stride == 0:
            self.numbers.append(number)
            if len(self.numbers) == self._most:
                self.numbers, self._stride = self.numbers[::2], 2 * self._stride
        self._num_added += 1


class Clock:
    """Stopwatch that never stops: `lap(phase)` books the time since the last lap on `phase`."""

    def __init__(self) -> None:
        self._ns = dict.fromkeys(PHASES, 0)
        self._last = perf_counter_ns()
        self._met_ns = 0
        self.waits: Thinned[float] = Thinned()
        """Seconds that this rank has waited at each of its meetings with the others, since `begin_epoch`."""
        self.steps: Thinned[tuple[float, ...]] = Thinned(MOST_STEPS)
        """Number in the epoch and seconds by phase of steps since `begin_epoch`: data, transfer, compute,
        communication, optimizer, others. `data` is the wait for the next step's."""
        self._num_begun = 0
        self._step_ns: list[int] = []
        self._follower: Callable[[str, int, int], None] | None = None

    def lap(self, phase: str) -> None:
        now = perf_counter_ns()
        self._ns[phase] += now - self._last
        if self._follower is not None:
            self._follower(phase, self._last, now)
        self._last = now

    def follow(self, follower: Callable[[str, int, int], None] | None) -> None:
        """Call `follower` with every lap: phase, begin and end in ns of `time.perf_counter_ns`; None calls nothing."""
        self._follower = follower

    @property
    def is_followed(self) -> bool:
        """True if something is called with every lap."""
        return self._follower is not None

    def begin_epoch(self, *, meets_on_host: bool = False) -> None:
        """Forget the waits of the last epoch. With `meets_on_host` ranks meet between steps (`reduce: param`)."""
        self.waits.clear()
        self.steps.clear()
        self._num_begun, self._step_ns = 0, []
        self._met_ns = self._ns["communication"]

    def begin_step(self) -> None:
        """Book the wait for the data of a step, which has come."""
        self.lap("data")
        self._keep_step()
        self._num_begun += 1

    def _keep_step(self) -> None:
        """Keep the phases of the step before, if it is one of those that are kept."""
        if self._step_ns:
            now = [self._ns[phase] for phase in STEP_COLUMNS]
            seconds = [1e-9 * (ended - began) for began, ended in zip(self._step_ns, now, strict=True)]
            self.steps.add((self._num_begun - 1, *seconds[:5], seconds[5] + seconds[6]))
        elif self._num_begun:
            self.steps.skip()
        self._step_ns = [self._ns[phase] for phase in STEP_COLUMNS] if self.steps.takes_next else []

    def meet(self) -> None:
        """Book a meeting of the ranks: this one has waited for it since the last lap."""
        self.lap("communication")
        waited = self._ns["communication"]
        self.waits.add((waited - self._met_ns) * 1e-9)
        self._met_ns = waited

    def collect(self) -> None:
        """Read what a device has counted, now that it has been waited for anyway."""

    def read(self) -> dict[str, float]:
        """Return seconds per phase since the clock was made."""
        return {phase: ns * 1e-9 for phase, ns in self._ns.items()}


def elapsed(earlier: dict[str, float], later: dict[str, float]) -> dict[str, float]:
    """Return seconds per phase between two readings."""
    return {phase: later[phase] - earlier[phase] for phase in later}


def computing_share(*seconds: Mapping[str, float]) -> float:
    """Return RETURNN's computing time: the share of all ranks' time in which they were not waiting for data."""
    total = sum(sum(rank.values()) for rank in seconds)
    return 1.0 - sum(rank["data"] for rank in seconds) / total if total else 1.0
