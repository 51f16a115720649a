"""How long a step takes in each of several ways: a copy of the model trained for some steps on real grains."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from paceline.config.errors import PacelineError
from paceline.config.settings import TrainConfig
from paceline.data.grain import Batch, Grain
from paceline.optim import build
from paceline.speed import precision
from paceline.speed.choice import CannotRun
from paceline.speed.graphs import CudaRecorder, Graphs
from paceline.speed.way import Way
from paceline.train.contract import OutOfMemory
from paceline.train.engine import Engine
from paceline.train.recorded import RecordedGrains
from paceline.train.task import Task
from paceline.world.discover import World
from paceline.world.link import Link

WARM_ROUNDS = 2
ROUNDS = 7
ENOUGH_S = 2.0
"""No further round is begun after so many seconds of them."""


def alone(link: Link) -> Link:
    """The same device without the other ranks, who wait for what is found here."""
    if link.world.size == 1:
        return link
    world = World(0, 0, 1, 1, 0, 1, "plain", None)
    return Link(world, link.device, link.threads, link.hosts[link.world.rank : link.world.rank + 1])


def step_seconds(
    way: Way,
    limit_s: float,
    *,
    task: Task,
    config: TrainConfig,
    link: Link,
    model: torch.nn.Module,
    grains: Sequence[Grain],
) -> float:
    """Seconds for one step on each of the grains, without their reading; `model` and the task's data stay as they are.

    Once a warm round has taken more than `limit_s`, that is the answer. Raises `CannotRun` where the way does not work
    here; what is wrong with the task itself comes out as it is.
    """
    is_plain = way == Way(way.level) and not way.is_compiled
    try:
        return _timed(_prepared(way, task, config, link, copy.deepcopy(model), grains), link.device, limit_s)
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        raise CannotRun("out of memory") from error
    except (PacelineError, CannotRun):
        raise
    except Exception as error:
        if is_plain:
            raise
        lines = str(error).strip().splitlines()
        raise CannotRun(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__) from error
    finally:
        gc.collect()
        if link.device.type == "cuda":
            torch.cuda.empty_cache()


def _prepared(
    way: Way, task: Task, config: TrainConfig, link: Link, model: torch.nn.Module, grains: Sequence[Grain]
) -> Callable[[], None]:
    """What runs one round."""
    engine = Engine(config, link=alone(link))
    engine.settle(precision.resolve_way(way, config.precision, precision.capabilities(link.device)))
    if way.kernels:
        task.accelerate(model)
    engine.prepare(model, task.optimizer(build.groups(model, config), config, link.device))
    loss = partial(task.loss, model)
    if way.graphs:
        engine.recorded = RecordedGrains(Graphs(model, CudaRecorder(link.device)), task.recordable, engine.forward)
        for grain in grains:
            if not engine.recorded.warm(loss, grain):
                raise CannotRun(f"no CUDA graph: {next(iter(engine.recorded.graphs.failures.values()))}")
    batches = [
        Batch(0, number, 1, len(grain), len(grain), [Grain(grain.data, 0, grain.samples)], own_count=len(grain))
        for number, grain in enumerate(grains)
    ]

    def round_() -> None:
        for batch in batches:
            engine.step(loss, batch)

    return round_


def _timed(round_: Callable[[], None], device: torch.device, limit_s: float) -> float:
    for _ in range(WARM_ROUNDS):
        round_()
    times: list[float] = []
    while len(times) < ROUNDS and sum(times) < ENOUGH_S and not (times and times[0] > limit_s):
        _wait(device)
        began = time.perf_counter()
        round_()
        _wait(device)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) if len(times) > 1 else statistics.fmean(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
