"""Timing of candidates: copies of the model trained for some steps on real grains, in this process."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import first_line
from paceline.core.torch_private import plain_step
from paceline.data.grain import Batch, Grain
from paceline.speed import compile_kernels as compiling
from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.choice import CannotRun
from paceline.speed.autotune.race import is_enough, medians, race
from paceline.speed.graphs import CudaRecorder
from paceline.train import setup
from paceline.train.loss import OutOfMemory
from paceline.train.stepper import Stepper
from paceline.train.task import Task, accelerate, recordable_of
from paceline.world.discover.environment import World
from paceline.world.installed import has_triton
from paceline.world.link import Link

WARM_ROUNDS = 2
FULL = "out of memory"
"""Why a candidate cannot run that may run another time."""


def alone(link: Link) -> Link:
    """Return a link to the same device without the other ranks, who wait for the choice."""
    if link.world.size == 1:
        return link
    world = World(0, 0, 1, 1, 0, 1, "plain", None)
    return Link(world, link.device, link.threads, link.hosts[link.world.rank : link.world.rank + 1])


@dataclass(frozen=True)
class Workload:
    """Everything that a candidate is measured with. `model` and the task's data stay as they are."""

    task: Task
    config: TrainConfig
    link: Link
    model: torch.nn.Module
    grains: Sequence[Grain]


class TimedSteps:
    """One step on each of the grains by one candidate, with a copy of the model: a round."""

    def __init__(self, candidate: Candidate, workload: Workload) -> None:
        task, config, link = workload.task, workload.config, workload.link
        model = copy.deepcopy(workload.model)
        stepper = self._stepper = Stepper(config, link=alone(link))
        stepper.settle(precision.resolve_candidate(candidate, config.precision, precision.capabilities(link.device)))
        if candidate.kernels:
            accelerate(task, model)
        setup.prepare(stepper, task, config, model)
        loss = self._loss = partial(task.loss, model)
        if candidate.graphs:
            recorded = stepper.record(CudaRecorder(link.device), recordable_of(task))
            recorded.graphs.expect(1)
            for grain in workload.grains:
                if not recorded.warm(loss, grain):
                    raise CannotRun(f"no CUDA graph: {next(iter(recorded.graphs.failures.values()))}")
        self._batches = [
            Batch(0, number, 1, len(grain), len(grain), [Grain(grain.data, 0, grain.samples)], own_count=len(grain))
            for number, grain in enumerate(workload.grains)
        ]

    def __call__(self) -> None:
        for batch in self._batches:
            self._stepper.step(self._loss, batch)

    def compile(self, shown: compiling.Shown) -> None:
        """Compile the kernels of a step in threads. The copy of the model is of no use afterwards."""
        prepared, clip = self._stepper.prepared, self._stepper.prepared.clip_norm
        with compiling.dry(shown):
            for batch in self._batches:
                prepared.begin_step(batch)
                total, _, _ = prepared.plain.forward(self._loss, batch.grains[0])
                prepared.plain.backward(total)
            found_inf = torch.zeros((), dtype=torch.float32, device=self._stepper.device)
            prepared.finite.find_inf(prepared.gradients(), found_inf)
            if clip is not None:
                clip.scale(prepared.updated, clip.norm(prepared.gradients()))
            plain_step(prepared.optimizer)

    def seconds(self) -> float:
        """Return the seconds of one round."""
        # How fp32 is multiplied is a setting of the process, which another candidate may have changed.
        precision.apply(self._stepper.precision)
        _wait(self._stepper.device)
        began = time.perf_counter()
        self()
        _wait(self._stepper.device)
        return time.perf_counter() - began


def compile_kernels(candidate: Candidate, shown: compiling.Shown, *, workload: Workload) -> None:
    """Compile the Triton kernels of a candidate in threads, where that is possible; whatever fails here, fails again,
    and is told, when it is run."""
    if workload.link.device.type != "cuda" or not (has_triton() and compiling.can_run_dry()):
        return
    with contextlib.suppress(CannotRun), _cleared(workload.link.device):
        TimedSteps(replace(candidate, graphs=False), workload).compile(shown)


def try_out(candidate: Candidate, *, workload: Workload) -> None:
    """Run one step on each of the grains; raises `CannotRun` where the candidate does not work here."""
    with _cleared(workload.link.device):
        TimedSteps(candidate, workload).seconds()


def step_seconds(candidate: Candidate, limit_s: float, *, workload: Workload) -> float:
    """Return the seconds of one round, without the reading of its grains.

    Once a few warm rounds have all taken more than `limit_s`, that is the answer. Raises `CannotRun` where the
    candidate does not work here, from whatever it ran into.
    """
    return _medians([candidate], limit_s, workload)[candidate]


def in_turns(candidates: Sequence[Candidate], *, workload: Workload) -> dict[Candidate, float]:
    """Return the seconds of one round of each, measured in a race.

    Raises `CannotRun` where there is no room for copies of the model for all of them.
    """
    return _medians(candidates, float("inf"), workload)


def _medians(candidates: Sequence[Candidate], limit_s: float, workload: Workload) -> dict[Candidate, float]:
    with _cleared(workload.link.device):
        return _race(candidates, limit_s, workload)


def _race(candidates: Sequence[Candidate], limit_s: float, workload: Workload) -> dict[Candidate, float]:
    # In a function of its own: the models are gone when `_cleared` frees memory.
    entrants = [TimedSteps(candidate, workload) for candidate in candidates]
    for steps in entrants:
        for _ in range(WARM_ROUNDS):
            steps.seconds()
    runners = [lambda number, steps=steps: steps.seconds() for steps in entrants]
    rounds = race(runners, lambda rounds: is_enough(rounds, limit_s))
    return dict(zip(candidates, medians(rounds), strict=True))


@contextlib.contextmanager
def _cleared(device: torch.device) -> Iterator[None]:
    """Turn any failure into `CannotRun`, and free memory: another candidate may do better."""
    try:
        yield
    except Exception as error:
        _let_go(error)
        if isinstance(error, CannotRun):
            raise
        is_full = isinstance(error, torch.OutOfMemoryError | OutOfMemory)
        raise CannotRun(FULL if is_full else first_line(error)) from error
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _let_go(error: BaseException | None) -> None:
    """Drop the frames of a failure: its message is kept, the model that was being computed is not."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
