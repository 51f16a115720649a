"""Clock of a GPU: what its stream did in some steps, by events that nobody waits for.

The host only launches work, so its laps say when it launched, not when the device computed. In every `SAMPLE_EVERY`th
step each lap also puts an event into the stream, up to the first one of the next step; they are read when the device
has been waited for anyway. A lap's share of the device's time is then that between two events: between steps it is
what the device waited for data, where it had caught up with the host, and nothing where it still had work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.observe.clock import Clock

SAMPLE_EVERY = 17
"""A prime, so that what happens every so many steps is not always missed, or always hit."""
STEP_PHASES = ("data", "transfer", "compute", "communication", "optimizer")
"""Phases of a step; all others are between steps, and are the host's."""


class Event(Protocol):
    """Event in a stream, as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> Any: ...


@dataclass
class DeviceTime:
    """Time of a device in the steps that were sampled."""

    num_steps: int = 0
    num_caught_up: int = 0
    """Steps of which all but the update was done by the time that the host had launched the update."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PHASES, 0.0))
    """Of the sampled steps together, by phase."""
    entry_s: float = 0.0
    """Wait of the host for the epoch's first batch, which no sample contains."""


class DeviceClock(Clock):
    """Clock of the host that also samples the device's time in some steps."""

    def __init__(self, make_event: Callable[[], Event], every: int = SAMPLE_EVERY) -> None:
        super().__init__()
        self._make_event, self._every = make_event, every
        self._marks: list[tuple[str, Event]] | None = None
        self._taken: list[tuple[list[tuple[str, Event]], bool, int]] = []
        self._is_caught_up = False
        self._num_steps = 0
        self._began_ns = 0
        self._meets_on_host = False  # then the host waits, and its own time is right
        self.device = DeviceTime()

    def begin_epoch(self, *, meets_on_host: bool = False) -> None:
        super().begin_epoch(meets_on_host=meets_on_host)
        self._meets_on_host = meets_on_host
        self._marks, self._taken, self._num_steps = None, [], 0
        self._began_ns = self._ns["data"]
        self.device = DeviceTime()
        if self._meets_on_host:
            del self.device.seconds["communication"]

    def begin_step(self) -> None:
        super().begin_step()
        if self._marks is not None:
            self._taken.append((self._marks, self._is_caught_up, self._num_steps - 1))
            self._marks = None
        if self._num_steps == 0:
            self.device.entry_s = (self._ns["data"] - self._began_ns) * 1e-9
        # Not the first steps, which compile and fill caches.
        if self._num_steps % self._every == self._every // 3:
            self._marks, self._is_caught_up = [], False
            self._mark("")
        self._num_steps += 1

    def _keep_step(self) -> None:
        """The host does not know the phases of a step: sampled ones are kept instead, by `collect`."""

    def lap(self, phase: str) -> None:
        super().lap(phase)
        if self._marks is None:
            return
        if phase == "optimizer":
            self._is_caught_up = self._marks[-1][1].query()
        self._mark(phase)

    def meet(self) -> None:
        if self._meets_on_host:
            super().meet()
        else:  # how long the stream waited is in the samples
            self.lap("communication")

    def collect(self) -> None:
        while self._taken and self._taken[0][0][-1][1].query():
            marks, is_caught_up, number = self._taken.pop(0)
            sampled = dict.fromkeys(self.device.seconds, 0.0)
            for (_, began), (phase, ended) in itertools.pairwise(marks):
                if phase in sampled:
                    sampled[phase] += float(began.elapsed_time(ended)) * 1e-3
            for phase, seconds in sampled.items():
                self.device.seconds[phase] += seconds
            self.steps.add((number, *(sampled.get(phase, 0.0) for phase in STEP_PHASES), 0.0))
            self.device.num_steps += 1
            self.device.num_caught_up += is_caught_up
            if not self._meets_on_host:
                self.waits.add(sampled["communication"])

    def _mark(self, phase: str) -> None:
        assert self._marks is not None
        event = self._make_event()
        event.record()
        self._marks.append((phase, event))


def apportion(host: Mapping[str, float], device: DeviceTime) -> dict[str, float]:
    """Divide the host's seconds of its steps as the device's were; the sum stays.

    The host waits for the device now and then, at no particular phase, so only the sum of its steps is right.
    """
    entry_s = min(device.entry_s, host["data"])
    measured = sum(device.seconds.values())
    if not measured:
        return dict(host)
    total = sum(host[phase] for phase in device.seconds) - entry_s
    divided = {phase: total * seconds / measured for phase, seconds in device.seconds.items()}
    divided["data"] += entry_s
    return {**host, **divided}
