"""One trial of `paceline tune`, inside its own processes: the training loop, warmed up, then timed in parts."""

from __future__ import annotations

import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError
from paceline.data.grain import Grain
from paceline.lab.tune.knobs import Facts, LevelFacts
from paceline.lab.tune.search import Speed
from paceline.observe.clock import computing_share, elapsed
from paceline.speed import precision
from paceline.train import summary
from paceline.train.feed import Feed
from paceline.train.loop import train
from paceline.train.probe import Probe, unkept
from paceline.train.run import Run, open_run
from paceline.train.task import Task
from paceline.world.link import Link

LEAST_PARTS, NUM_PARTS = 3, 7
PATIENCE = 3.0
"""A trial that takes so many times longer than planned, because the machine is busy, makes do with fewer parts."""
LEAST_STEPS_PER_PART = 2
LEAST_WARM, MOST_WARM = 5, 20
"""Steps of warm-up."""
UNSETTLED = 3.0
"""A step so many times longer than others is still part of the warm-up: it compiled, or allocated."""
_FOREVER = 1_000_000


@dataclass(frozen=True)
class Part:
    """One part of the timed steps, on one rank."""

    seconds: float
    num_samples: int
    length: float | None


class Pace(Protocol):
    """Lets a trial go on, part by part, and gets the speed of each; asked on the first rank."""

    def may_go(self, number: int) -> bool:
        """Return True if another part is wanted; may block."""
        ...

    def passed(self, number: int, samples_per_s: float) -> None: ...


def trial(
    task: Task,
    config: TrainConfig,
    link: Link,
    measure_s: float,
    tell: Callable[[Facts], None] = lambda facts: None,
    pace: Pace | None = None,
) -> Speed:
    """Train for about `measure_s` seconds after a warm-up and say how fast it went; nothing is kept.

    All ranks get the same answer. `tell` is told what is known before the first step, on the first rank. With a
    `pace`, it takes as many parts as that wants.
    """
    timing = _Timing(measure_s, tell, pace)
    train(open_run(task, unkept(config, _FOREVER), link, probe=timing))
    if not timing.is_over or not timing.parts:
        raise TrialStopped
    ranks = link.gather_objects((timing.parts, timing.memory_bytes(), timing.seconds))
    rates = join([parts for parts, _, _ in ranks], timing.mean_length)
    return Speed(
        # Of what else happens on this machine, the median hears least.
        samples_per_s=statistics.median(rates),
        spread=statistics.stdev(rates) / statistics.fmean(rates) if len(rates) > 1 else 0.0,
        memory_bytes=max(memory for _, memory, _ in ranks),
        data_share=1.0 - computing_share(*(seconds for _, _, seconds in ranks)),
        workers=timing.workers,
    )


class TrialStopped(PacelineError):
    """A signal ended a trial before it was over."""

    sentence = "a trial was asked to stop: nothing was measured"
    hint = "type the command again"


def join(ranks: Sequence[Sequence[Part]], mean_length: float | None) -> list[float]:
    """Samples per second of each part over all ranks, each part in the time of its slowest rank.

    Where samples have lengths, a second of work is worth as many samples as an average one is long: what a trial
    happened to see of long and short ones does not make it slow or fast.
    """
    rates = []
    for parts in zip(*ranks, strict=True):
        seconds = max(part.seconds for part in parts)
        lengths = [part.length for part in parts if part.length is not None]
        samples: float = sum(part.num_samples for part in parts)
        if mean_length and len(lengths) == len(parts):
            samples = math.fsum(lengths) / mean_length
        rates.append(samples / seconds)
    return rates


def is_settled(step_s: Sequence[float]) -> bool:
    """Return True if the last steps were about as long as the others."""
    if len(step_s) < LEAST_WARM:
        return False
    return len(step_s) >= MOST_WARM or max(step_s[-3:]) <= UNSETTLED * statistics.median(step_s)


def steps_per_part(step_s: float, measure_s: float) -> int:
    return max(LEAST_STEPS_PER_PART, math.ceil(measure_s / max(step_s, 1e-9) / NUM_PARTS))


class _Timing(Probe):
    """Times the steps after a warm-up, part by part, until there are enough parts."""

    def __init__(self, measure_s: float, tell: Callable[[Facts], None], pace: Pace | None) -> None:
        self.parts: list[Part] = []
        self.mean_length: float | None = None
        self.workers = 0
        self.seconds: dict[str, float] = {}
        self._measure_s, self._tell, self._pace = measure_s, tell, pace
        self._warm: list[float] = []
        self._left = 0  # steps of this part that are to come
        self._per_part, self._is_slow = 0, False
        self._lengths: Any = None
        self._num_samples, self._length = 0, 0.0
        self._before: dict[str, float] = {}

    def memory_bytes(self) -> int:
        if self._link.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._link.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def begin(self, run: Run, feed: Feed) -> None:
        self._link, self._clock, self._data = run.link, run.clock, feed
        if not feed.is_stream and feed.lengths is not None:
            self._lengths, self.mean_length = feed.lengths, float(feed.lengths.mean())
        data = summary.data_facts(feed, 0)
        if self._link.is_first:
            self._tell(_facts(run, data, has_lengths=self.mean_length is not None))
        self._began = time.perf_counter()

    def after_step(self, num_steps: int, grains: Sequence[Grain]) -> None:
        if not self._per_part:
            self._warm_up()
            return
        self._num_samples += sum(len(grain) for grain in grains)
        if self._lengths is not None:
            self._length += sum(float(self._lengths[grain.samples].sum()) for grain in grains)
        self._left -= 1
        if self._left == 0 and not self.is_over:
            self._end_part()

    def _warm_up(self) -> None:
        """Until all ranks' steps are of the same length; then agree how many of them make a part."""
        self._warm.append(self._lap())
        ranks = self._link.gather_objects((is_settled(self._warm), self._warm[-1]))
        if all(settled for settled, _ in ranks):
            slowest = max(self._link.gather_objects(statistics.fmean(self._warm[-3:])))
            self._per_part = self._left = steps_per_part(slowest, self._measure_s)
            self._before = self._clock.read()
            self._go_on()

    def _end_part(self) -> None:
        length = self._length if self._lengths is not None else None
        self.parts.append(Part(self._lap(), self._num_samples, length))
        self._num_samples, self._length, self._left = 0, 0.0, self._per_part
        ranks = self._link.gather_objects(self.parts)
        if self._pace is not None and self._link.is_first:
            self._pace.passed(len(self.parts) - 1, join([parts[-1:] for parts in ranks], self.mean_length)[0])
        taken_s = max(math.fsum(part.seconds for part in parts) for parts in ranks)
        self._is_slow = len(self.parts) >= LEAST_PARTS and taken_s > PATIENCE * self._measure_s
        self._go_on()

    def _go_on(self) -> None:
        """Begin another part, or end; all ranks do the same."""
        if self._pace is None:
            may_go = len(self.parts) < NUM_PARTS and not self._is_slow
        else:
            may_go = self._link.broadcast_object(self._pace.may_go(len(self.parts)) if self._link.is_first else None)
        if not may_go:
            self.is_over = True
            self._clock.lap("compute")
            self.seconds, self.workers = elapsed(self._before, self._clock.read()), self._data.workers
        self._lap()

    def _lap(self) -> float:
        """Seconds since the last lap, the device's work included."""
        if self._link.device.type == "cuda":
            torch.cuda.synchronize(self._link.device)
        began, self._began = self._began, time.perf_counter()
        return self._began - began


def _facts(run: Run, data: summary.DataFacts, *, has_lengths: bool) -> Facts:
    link, config = run.link, run.config
    able = precision.capabilities(link.device)
    now = run.stepper.precision
    levels = []
    for level in config.possible_levels:
        try:
            resolved = precision.resolve(level, config.precision, able)
        except (precision.LevelUnsupported, precision.LevelConflict):
            continue
        levels.append(LevelFacts(level, _computes(resolved), resolved.compile))
    return Facts(
        device=able.device,
        device_name=able.name,
        ranks=link.world.size,
        cores=len(os.sched_getaffinity(0)),
        threads=link.threads,
        grains=run.resume.grains,
        levels=tuple(levels),
        computes=_computes(now),
        compiles=now.compile,
        num_samples=data.num_samples,
        has_lengths=has_lengths,
        padding=data.padding,
        is_stream=data.num_samples is None,
        memory_bytes=_memory_bytes(link),
    )


def _memory_bytes(link: Link) -> int:
    if link.device.type == "cuda":
        return torch.cuda.mem_get_info(link.device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // link.world.local_size


def _computes(resolved: precision.Precision) -> str:
    """The same for levels that differ in name alone."""
    return repr(replace(resolved, level=0, name="", notes=()))
