"""How fast a task trains here: the training loop itself, some steps of it timed, nothing kept.

OpenSeq2Seq's bench mode: `bench_steps` steps, of which those from `bench_start` on count, so that compilation, memory
pools and caches have settled. The device is waited for at both ends and nowhere between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError
from paceline.data.grain import Grain
from paceline.observe.clock import elapsed
from paceline.parallel.step import Step
from paceline.train.feed import Feed
from paceline.train.task import Stage, Task, lengths_of
from paceline.train.trainer import Result, Trainer
from paceline.world.link import Link


class NoStepsToTime(PacelineError):
    """The benchmark ends before its timed part begins."""

    def __init__(self, steps: int, first: int) -> None:
        super().__init__(f"`bench_steps` is {steps}, but timing begins after `bench_start` = {first} steps")
        self.hint = f"set `--bench-steps {first + 50}`, or `--bench-start 0`"


class BenchmarkStopped(PacelineError):
    """A signal ended the benchmark before its last step."""

    hint = "run it again, with fewer `--bench-steps` if it took too long"

    def __init__(self, num_steps: int) -> None:
        super().__init__(f"asked to stop after {num_steps} steps: nothing was measured")


@dataclass(frozen=True)
class Benchmark(Result):
    """What a benchmark found. `seconds` are of the timed steps on the slowest rank, by phase."""

    mode: str = "benchmark"
    first_step: int = 0
    """First step that was timed; `num_steps` counts all that were done."""
    num_samples: int = 0
    """Of the timed steps, over all ranks."""
    length: float | None = None
    """Of these samples together (seconds of audio, tokens: the unit of the data's lengths), without padding."""

    @property
    def timed_steps(self) -> int:
        return self.num_steps - self.first_step

    @property
    def wall_s(self) -> float:
        """Of the timed steps."""
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
        """For the console."""
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
        timed = f"steps {self.first_step} to {self.num_steps - 1}, {self.num_samples} samples in {self.wall_s:.3f} s"
        return [f"benchmark: {timed}", *(f"  {name:<17}{value}" for name, value in rows)]


@dataclass(frozen=True)
class Measured:
    """What one rank saw of the timed steps."""

    seconds: dict[str, float]
    num_samples: int
    length: float | None


def benchmark(task: Task, config: TrainConfig, link: Link) -> Benchmark:
    """Train for `bench_steps` steps and say how fast it went; no run folder is made or changed."""
    if config.bench_steps <= config.bench_start:
        raise NoStepsToTime(config.bench_steps, config.bench_start)
    bench = _Bench(task, config, link)
    result = bench.fit()
    if bench.measured is None:
        raise BenchmarkStopped(result.num_steps)
    found = join(link.gather_objects(bench.measured), config.bench_start, result)
    for line in found.lines():
        bench.progress.say(line)
    return found


def join(ranks: Sequence[Measured], first_step: int, result: Result) -> Benchmark:
    """All ranks' samples in the time of the slowest."""
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


def unkept(config: TrainConfig, steps: int) -> TrainConfig:
    """The same training for so many steps, of which nothing is kept, validated or logged elsewhere."""
    nowhere = {"out": None, "exp_name": None, "resume": "no", "loggers": (), "rank_logs": False}
    unseen = {"mode": "train", "val_every_steps": None, "val_every_epochs": None, "monitor": None, "patience": None}
    unsaved = {"save_every_steps": None, "save_every_epochs": None}
    return config.model_copy(update={**nowhere, **unseen, **unsaved, "epochs": None, "steps": steps})


class _Bench(Trainer):
    """The training loop, watched: the first stage over and over until there are enough steps."""

    def __init__(self, task: Task, config: TrainConfig, link: Link) -> None:
        super().__init__(task, unkept(config, config.bench_steps), link)
        self.stages: list[Stage] = [replace(self.stages[0], epochs=None)]
        self.measured: Measured | None = None
        self._own_after_step, self._after_step = self._after_step, self._watch
        self._lengths: Any = None
        self._num_samples, self._length = 0, 0.0
        self._before = self._read_clock()

    def _feed(self, number: int, stage: Stage) -> Feed:
        feed = super()._feed(number, stage)
        self._lengths = None if feed.is_stream else lengths_of(self.task, feed.data)
        return feed

    def _watch(self, model: torch.nn.Module, step: Step, grains: list[Grain]) -> None:
        if self._own_after_step is not None:
            self._own_after_step(model, step, grains)
        done = step.number + 1
        if done > self.config.bench_start:
            self._num_samples += sum(len(grain) for grain in grains)
            if self._lengths is not None:
                self._length += sum(float(self._lengths[grain.samples].sum()) for grain in grains)
        if done == self.config.bench_start:
            self._before = self._read_clock()
        if done == self.config.bench_steps:
            length = None if self._lengths is None else self._length
            self.measured = Measured(elapsed(self._before, self._read_clock()), self._num_samples, length)

    def _read_clock(self) -> dict[str, float]:
        if self.link.device.type == "cuda":
            torch.cuda.synchronize(self.link.device)
        self.clock.lap("compute")
        return self.clock.read()
