"""How long a step takes in each of several ways: a copy of the model trained for some steps on real grains."""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import first_line
from paceline.data.grain import Batch, Grain
from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.choice import CannotRun
from paceline.speed.graphs import CudaRecorder, Graphs
from paceline.train import setup
from paceline.train.engine import Engine
from paceline.train.loss import OutOfMemory
from paceline.train.task import Task, accelerate, recordable_of
from paceline.world.discover.environment import World
from paceline.world.link import Link

WARM_ROUNDS = 2
FEWEST_ROUNDS = 3
ROUNDS = 7
ENOUGH_S = 2.0
"""No further round is begun after so many seconds of them, and the fewest."""


def alone(link: Link) -> Link:
    """The same device without the other ranks, who wait for what is found here."""
    if link.world.size == 1:
        return link
    world = World(0, 0, 1, 1, 0, 1, "plain", None)
    return Link(world, link.device, link.threads, link.hosts[link.world.rank : link.world.rank + 1])


@dataclass(frozen=True)
class Workload:
    """What every way is measured with. `model` and the task's data stay as they are."""

    task: Task
    config: TrainConfig
    link: Link
    model: torch.nn.Module
    grains: Sequence[Grain]


class TimedSteps:
    """One step on each of the grains, in one way, with a copy of the model."""

    def __init__(self, way: Candidate, workload: Workload) -> None:
        task, config, link = workload.task, workload.config, workload.link
        model = copy.deepcopy(workload.model)
        engine = self._engine = Engine(config, link=alone(link))
        engine.settle(precision.resolve_candidate(way, config.precision, precision.capabilities(link.device)))
        if way.kernels:
            accelerate(task, model)
        setup.prepare(engine, task, config, model)
        loss = self._loss = partial(task.loss, model)
        if way.graphs:
            recorded = engine.record(Graphs(model, CudaRecorder(link.device)), recordable_of(task))
            for grain in workload.grains:
                if not recorded.warm(loss, grain):
                    raise CannotRun(f"no CUDA graph: {next(iter(recorded.graphs.failures.values()))}")
        self._batches = [
            Batch(0, number, 1, len(grain), len(grain), [Grain(grain.data, 0, grain.samples)], own_count=len(grain))
            for number, grain in enumerate(workload.grains)
        ]

    def __call__(self) -> None:
        for batch in self._batches:
            self._engine.step(self._loss, batch)

    def seconds(self) -> float:
        """Of one round. How fp32 is multiplied is a setting of the process, which another way may have changed."""
        precision.apply(self._engine.precision)
        _wait(self._engine.device)
        began = time.perf_counter()
        self()
        _wait(self._engine.device)
        return time.perf_counter() - began


def step_seconds(way: Candidate, limit_s: float, *, workload: Workload) -> float:
    """Seconds for one round, without the reading of its grains.

    Once a few warm rounds have all taken more than `limit_s`, that is the answer. Raises `CannotRun` where the way does
    not work here, from whatever it ran into.
    """
    with _cleared(workload.link.device):
        return _one(way, limit_s, workload)


def in_turns(ways: Sequence[Candidate], *, workload: Workload) -> dict[Candidate, float]:
    """Seconds for one round of each, in turns: what else the machine does hits all alike.

    Raises `CannotRun` where there is no room for copies of the model for all of them.
    """
    with _cleared(workload.link.device):
        return _several(ways, workload)


def _one(way: Candidate, limit_s: float, workload: Workload) -> float:
    round_ = TimedSteps(way, workload)
    for _ in range(WARM_ROUNDS):
        round_()
    return enough(round_.seconds, limit_s)


def _several(ways: Sequence[Candidate], workload: Workload) -> dict[Candidate, float]:
    rounds = {way: TimedSteps(way, workload) for way in ways}
    for round_ in rounds.values():
        for _ in range(WARM_ROUNDS):
            round_.seconds()
    times: dict[Candidate, list[float]] = {way: [] for way in ways}

    def turn() -> float:
        spent = {way: rounds[way].seconds() for way in ways}
        for way, seconds in spent.items():
            times[way].append(seconds)
        return sum(spent.values()) / len(ways)

    enough(turn)
    return {way: statistics.median(each) for way, each in times.items()}


def enough(seconds: Callable[[], float], limit_s: float = float("inf")) -> float:
    """The median of as many rounds as it takes: at least `FEWEST_ROUNDS`, so that a single disturbed one decides
    nothing."""
    times: list[float] = []
    while len(times) < FEWEST_ROUNDS or (len(times) < ROUNDS and sum(times) < ENOUGH_S and min(times) <= limit_s):
        times.append(seconds())
    return statistics.median(times)


@contextlib.contextmanager
def _cleared(device: torch.device) -> Iterator[None]:
    """Whatever a way runs into is no reason to end the run: another may do better, with all memory to itself."""
    try:
        yield
    except Exception as error:
        _let_go(error)
        if isinstance(error, CannotRun):
            raise
        is_full = isinstance(error, torch.OutOfMemoryError | OutOfMemory)
        raise CannotRun("out of memory" if is_full else first_line(error)) from error
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _let_go(error: BaseException | None) -> None:
    """A failure is kept, for what it says; the model that was being computed is not."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
