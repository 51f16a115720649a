"""Measurements of a rank while it trains, beside losses: time, amount of data, memory, compilation."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.config.settings import TrainConfig
from paceline.data.grain import Batch
from paceline.observe.clock import Clock, elapsed
from paceline.observe.device_clock import DeviceClock
from paceline.observe.epoch import EpochSums, RankEpoch, core_shares, epoch_record, join_launches, whole_record
from paceline.observe.records import EpochRecord, Profile, Way
from paceline.observe.throughput import Units, peak_flops
from paceline.speed import precision
from paceline.speed.compile import Compiled, compiled_so_far
from paceline.train import step_profile
from paceline.train.feed import Feed
from paceline.train.prepare import sums_in_tree
from paceline.train.stepper import Stepper
from paceline.train.task import Reports, Task


def make_clock(device: torch.device) -> Clock:
    """Return the host's clock, with samples of the device's time where there is one."""
    if device.type == "cpu":
        return Clock()
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))


class Meter:
    """Instruments of one rank. Those of all ranks are combined once an epoch."""

    def __init__(
        self, clock: Clock, stepper: Stepper, task: Task, config: TrainConfig, so_far: Mapping[str, Any] | None = None
    ) -> None:
        """`so_far` are the sums of an epoch that a checkpoint is in the middle of."""
        self.clock, self._stepper, self._task, self._config = clock, stepper, task, config
        self.earlier = EpochSums.load(so_far)
        self._before = self._ended = clock.read()
        self._compiled = compiled_so_far()
        self._device = None if stepper.device.type == "cpu" else precision.capabilities(stepper.device)
        self._feed: Feed | None = None
        self.units = Units()
        self._core_wait_s: float | None = None
        self._lengths: NDArray[Any] | None = None
        self._num_profiles = 0

    def begin_epoch(self, feed: Feed, epoch: int, step: int) -> None:
        """Start the measurements of an epoch; its steps before `step` were done by earlier launches."""
        clock = self.clock
        if step == 0:
            self.earlier = EpochSums()
        clock.begin_epoch(meets_on_host=self._stepper.prepared.strategy.meets_on_host)
        self._order_s = self._stepper.prepared.strategy.order_s
        self._began_at = epoch, step
        self._before, self._core_wait_s = clock.read(), core_wait_s()
        self._between = elapsed(self._ended, self._before)
        self._num_samples, self._count, self._length, self._work, self._grains = 0, 0.0, 0.0, 0.0, 0
        self._unread: list[NDArray[np.int64]] = []
        if feed is self._feed:
            return
        self._feed, self._lengths = feed, feed.lengths
        # Of data that may become longer on its way, only it knows how long it is.
        total = feed.traits.total_length
        self._stretch = 1.0
        if self._lengths is not None and total is not None:
            self._stretch = total / (float(self._lengths.sum(dtype=float)) or 1.0)
        task = self._task
        flops = task.flops(self._stepper.model) if isinstance(task, Reports) else None
        self.units = Units(task.sample_unit, task.length_unit, task.count_unit, flops, task.rate_words)

    def note(self, batch: Batch) -> None:
        """Count a batch that a step was done with."""
        self._count += batch.own_count
        self._grains = max(self._grains, len(batch.grains))
        for grain in batch.grains:
            self._num_samples += len(grain.samples)
            if self._lengths is not None:
                self._unread.append(grain.samples)

    def settle(self) -> None:
        """Read what the device has counted, and do what was put off. Called when the device was waited for anyway."""
        self.clock.collect()
        if self._unread and self._lengths is not None:
            for samples in self._unread:
                lengths = self._lengths[samples]
                self._length += float(lengths.sum(dtype=np.float64)) * self._stretch
                self._work += len(lengths) * float(lengths.max())
            self._unread = []

    def end_epoch(self) -> tuple[EpochRecord, EpochRecord]:
        """Return the measurements of all ranks since this launch began the epoch, with what its verdict depends on, and
        those numbers that can be had of the whole epoch. All ranks must call it."""
        now, compiled = self.clock.read(), compiled_so_far()
        ranks = self._stepper.link.gather_objects(self._measured(now, compiled))
        self.clock.lap("communication")
        self._ended, self._compiled = now, compiled
        name = None if self._device is None else self._device.name
        peak = None if name is None else peak_flops(name, self._dtype)
        launch = epoch_record(ranks, self.units, device=name, peak_flops=peak)
        hosts = list(self._stepper.link.hosts)
        shares = core_shares(hosts, [rank.cores for rank in ranks])
        launch = replace(launch, hosts=hosts, core_shares=shares, way=self._way(), profile=self._profile(ranks))
        return launch, whole_record(join_launches(self.earlier.ranks, ranks), self.units)

    def _profile(self, ranks: Sequence[RankEpoch]) -> Profile | None:
        """Return the profile of the epoch for its record, in the first epochs of a launch."""
        feed = self._feed
        if feed is None or not self._stepper.link.is_first or self._num_profiles == step_profile.NUM_EPOCHS:
            return None
        self._num_profiles += 1
        steps = step_profile.thinned([rank.steps for rank in ranks])
        epoch, first = self._began_at
        plan = None if feed.is_stream else feed.plan(epoch)
        return replace(
            step_profile.sizes(self._stepper.prepared),
            device=self._stepper.device.type,
            steps=steps,
            costs=[] if plan is None else step_profile.costs(plan, [first + int(row[0]) for row in steps[0]]),
            epoch_steps=0 if plan is None else plan.num_steps,
            has_lengths=self._lengths is not None,
            in_blocks=sums_in_tree(self._config),
        )

    def recall(self) -> EpochRecord:
        """Return the measurements of an epoch of which earlier launches did all steps."""
        return replace(epoch_record(self.earlier.ranks, self.units), way=self._way())

    def so_far(self) -> list[RankEpoch]:
        """Return the measurements of the epoch by rank, of this launch and those before. All ranks must call it."""
        measured = self._measured(self.clock.read(), self._compiled)
        return join_launches(self.earlier.ranks, self._stepper.link.gather_objects(measured))

    def _measured(self, now: dict[str, float], compiled: Compiled) -> RankEpoch:
        """Return the measurements of this rank by this launch."""
        self.settle()
        lately = compiled.since(self._compiled)
        compiles = self._stepper.precision.compile
        return RankEpoch(
            seconds=elapsed(self._before, now),
            between=self._between,
            num_samples=self._num_samples,
            count=self._count,
            length=None if self._lengths is None else self._length,
            work=self._num_samples if self._lengths is None else self._work,
            core_wait_s=None if self._core_wait_s is None else (core_wait_s() or 0.0) - self._core_wait_s,
            sums_s=max(0.0, self._stepper.prepared.strategy.order_s - self._order_s),
            host_bytes=_host_bytes(),
            device_bytes=None if self._device is None else torch.cuda.max_memory_allocated(self._stepper.device),
            waits=self.clock.waits.numbers,
            steps=self.clock.steps.numbers,
            device=self.clock.device if isinstance(self.clock, DeviceClock) else None,
            recompiles=lately.recompiles if compiles else None,
            compile_s=lately.seconds,
            cores=sorted(os.sched_getaffinity(0)),
        )

    def _way(self) -> Way:
        config, world, feed = self._config, self._stepper.link.world, self._feed
        assert feed is not None
        chosen = self._stepper.precision
        return Way(
            level=4 if chosen.graphs or chosen.kernels else chosen.level,
            highest_level=max(config.possible_levels, default=0),
            precision=config.precision,
            order=config.order,
            bins=config.bins,
            reduce=config.reduce,
            wire=config.wire,
            shard=config.shard,
            sync_step=config.sync_step,
            sync_overlap=config.sync_overlap,
            workers=feed.workers,
            is_stream=feed.is_stream,
            is_packed=feed.traits.is_packed,
            cores=len(os.sched_getaffinity(0)),
            local_size=world.local_size,
            grains_per_rank=self._grains,
            has_bf16=self._device is not None and self._device.bf16,
            depthwise=has_depthwise(self._stepper.model),
        )

    @property
    def _dtype(self) -> str:
        """Precision of matrix products, by name."""
        chosen = self._stepper.precision
        words = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
        dtype = chosen.weights if chosen.autocast is None else chosen.autocast
        return words.get(dtype, "tf32" if chosen.fp32_matmul == "tf32" else "fp32")


def has_depthwise(model: nn.Module) -> bool:
    """Return True if the model has convolutions of one channel each with a kernel larger than 1."""
    return any(
        isinstance(module, nn.Conv1d | nn.Conv2d)
        and module.groups == module.in_channels > 1
        and max(module.kernel_size) > 1
        for module in model.modules()
    )


def core_wait_s() -> float | None:
    """Return the seconds so far in which this thread was ready but had no core; None where they are not counted."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError):
        return None


def _host_bytes() -> int:
    """Return the peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
