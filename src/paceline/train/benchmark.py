"""Speed of a task on this machine: the training loop itself, some steps of it timed, nothing kept.

OpenSeq2Seq's bench mode: `bench_steps` steps, of which those from `bench_start` on count, so that compilation, memory
pools and caches have settled. The device is waited for at both ends and nowhere between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import Failed, InvalidSetting
from paceline.core.units import counted
from paceline.data.grain import Grain
from paceline.observe.clock import elapsed
from paceline.train.feed import Feed
from paceline.train.loop import train
from paceline.train.probe import Probe, unkept
from paceline.train.result import Result
from paceline.train.run import Run, open_run
from paceline.train.task import Task
from paceline.world.link import Link


@dataclass(frozen=True)
class Benchmark(Result):
    """Result of a benchmark. `seconds` are of the timed steps on the slowest rank, by phase."""

    mode: str = "benchmark"
    first_step: int = 0
    """First step that was timed; `num_steps` counts all that were done."""
    num_samples: int = 0
    """Samples of the timed steps, over all ranks."""
    length: float | None = None
    """Length of these samples together (seconds of audio, tokens: the unit of the data), without padding."""

    @property
    def timed_steps(self) -> int:
        return self.num_steps - self.first_step

    @property
    def wall_s(self) -> float:
        """Seconds of the timed steps."""
        return math.fsum(self.seconds.values())

    @property
    def step_s(self) -> float:
        return self.wall_s / self.timed_steps

    @property
    def objects_per_s(self) -> float:
        """Samples per second, over all ranks."""
        return self.num_samples / self.wall_s

    @property
    def lengths_per_s(self) -> float | None:
        return None if self.length is None else self.length / self.wall_s

    def lines(self) -> list[str]:
        """Return the result as lines for the console."""
        rows = [
            ("time per step", f"{1e3 * self.step_s:.4g} ms"),
            ("objects/s", f"{self.objects_per_s:.6g}"),
        ]
        if self.lengths_per_s is not None:
            rows.append(("lengths/s", f"{self.lengths_per_s:.6g}"))
        for phase, seconds in self.seconds.items():
            if seconds:
                share = 100 * seconds / self.wall_s
                rows.append((f"  {phase}", f"{1e3 * seconds / self.timed_steps:.4g} ms per step ({share:.1f}%)"))
        samples = counted(self.num_samples, "sample")
        timed = f"steps {self.first_step} to {self.num_steps - 1}, {samples} in {self.wall_s:.3f} s"
        return [f"benchmark: {timed}", *(f"  {name:<17}{value}" for name, value in rows)]


@dataclass(frozen=True)
class Measured:
    """The timed steps on one rank."""

    seconds: dict[str, float]
    num_samples: int
    length: float | None


def benchmark(task: Task, config: TrainConfig, link: Link) -> Benchmark:
    """Train for `bench_steps` steps and report the speed; no run folder is made or changed."""
    if config.bench_steps <= config.bench_start:
        raise InvalidSetting(
            f"`bench_steps` is {config.bench_steps}, but timing begins after `bench_start` = "
            f"{counted(config.bench_start, 'step')}",
            hint=f"set `--bench-steps {config.bench_start + 50}`, or `--bench-start 0`",
        )
    timing = _Timing(config)
    run = open_run(task, unkept(config, config.bench_steps), link, probe=timing)
    result = train(run)
    if timing.measured is None:
        raise Failed(
            f"asked to stop after {counted(result.num_steps, 'step')}: nothing was measured",
            hint="run it again, with fewer `--bench-steps` if it took too long",
        )
    joined = join(link.gather_objects(timing.measured), config.bench_start, result)
    for line in joined.lines():
        run.progress.say(line)
    return joined


def join(ranks: Sequence[Measured], first_step: int, result: Result) -> Benchmark:
    """Combine the ranks: all samples, in the time of the slowest."""
    slowest = max(ranks, key=lambda rank: math.fsum(rank.seconds.values()))
    lengths = [rank.length for rank in ranks if rank.length is not None]
    return Benchmark(
        "measured",
        result.num_steps,
        result.loss,
        seconds=slowest.seconds,
        first_step=first_step,
        num_samples=sum(rank.num_samples for rank in ranks),
        length=math.fsum(lengths) if lengths else None,
    )


class _Timing(Probe):
    """Times the steps from `bench_start` on, and counts what was trained on."""

    def __init__(self, config: TrainConfig) -> None:
        self._first, self._last = config.bench_start, config.bench_steps
        self.measured: Measured | None = None
        """None until the last step is done."""
        self._num_samples, self._length = 0, 0.0

    def begin(self, run: Run, feed: Feed) -> None:
        self._clock, self._device, self._lengths = run.clock, run.link.device, feed.lengths
        self._before = self._read_clock()

    def after_step(self, num_steps: int, grains: Sequence[Grain]) -> None:
        if num_steps > self._first:
            self._num_samples += sum(len(grain) for grain in grains)
            if self._lengths is not None:
                self._length += sum(float(self._lengths[grain.samples].sum()) for grain in grains)
        if num_steps == self._first:
            self._before = self._read_clock()
        if num_steps == self._last:
            length = None if self._lengths is None else self._length
            self.measured = Measured(elapsed(self._before, self._read_clock()), self._num_samples, length)

    def _read_clock(self) -> dict[str, float]:
        """Wait for the device, then read where the time went."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._clock.lap("compute")
        return self._clock.read()
