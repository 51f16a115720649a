"""Simulator of ranks, links and failures: a row of events per step, for all ranks at once. Pure; one seed, one answer.

Time is that of each rank: when it has computed, when each bucket of gradients is complete on the last of the ranks,
when the link is free for it. What happens at a moment depends only on what was before, so events are taken step by
step, and arrays over the ranks stand where a queue of events would have one entry per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST_NUMBERS = 1 << 18
"""Numbers that are drawn at once: steps x ranks."""
MOST_FAILURES = 100_000
"""Failures after which a run is taken for one that never ends."""


@dataclass(frozen=True)
class Steps:
    """Work of the ranks, in seconds of a machine like those that were measured; arrays are (plan steps, ranks)."""

    compute_s: Array
    """Forward and backward of all grains."""
    last_s: Array
    """Last backward, in which gradients are sent."""
    data_s: Array
    """Wait for data."""
    rest_s: float
    """Update, logging and what else each step has."""


@dataclass(frozen=True)
class Noise:
    """Measured spread of computing times, as ratios to what was expected."""

    ratios: Array
    """Of single steps; one is drawn for each step of each rank."""
    hosts: Array
    """Of machines, over all of their steps; one is drawn for each rank."""


@dataclass(frozen=True)
class Gradients:
    """Buckets that are summed while the last backward runs."""

    seconds: Sequence[float]
    """On the link, of each bucket in its turn; none on one rank."""
    ready: Sequence[float]
    """Share of the last backward after which a bucket is complete; the last one waits for the end."""
    slow_down: float = 1.0
    """Factor on computing while a link is busy."""
    host_s: float = 0.0
    """What each meeting takes beside the link."""


@dataclass(frozen=True)
class Averages:
    """Ranks step apart and average their models now and then."""

    interval: int
    overlap: int
    """Steps that go on meanwhile."""
    first_s: float
    """On the link: sums, or their first hop."""
    second_s: float
    """Second hop, which begins between two steps."""
    host_s: float
    """What no overlap hides: copies, rounding, the update."""


@dataclass(frozen=True)
class Shards:
    """Blocks that are gathered and scattered in forward and backward, on all ranks alike."""

    exposed_s: float
    """That computing does not hide, in each step."""


Meeting = Gradients | Averages | Shards


@dataclass(frozen=True)
class Simulated:
    """Steps as they went. Parts are means over ranks and steps, and add up to the mean of `seconds`."""

    seconds: Array
    """Of each step; with averages, of each interval divided by its steps."""
    weights: Array
    """Steps that each of `seconds` stands for."""
    compute_s: float
    communication_s: float
    waiting_s: float
    data_s: float
    rest_s: float

    @property
    def step_s(self) -> float:
        return float(np.average(self.seconds, weights=self.weights))


def simulate(steps: Steps, noise: Noise, meeting: Meeting, num_steps: int, seed: int = 0) -> Simulated:
    """Return `num_steps` steps of all ranks; those of the plan come again and again."""
    random = np.random.Generator(np.random.Philox(key=seed % 2**64))
    ranks = steps.compute_s.shape[1]
    hosts = random.choice(noise.hosts, ranks) if len(noise.hosts) > 1 else np.full(ranks, noise.hosts[0])
    if isinstance(meeting, Averages):
        return _apart(steps, noise, hosts, meeting, num_steps, random)
    return _together(steps, noise, hosts, meeting, num_steps, random)


def _chunks(num_steps: int, ranks: int, most: int | None = None) -> Iterator[range]:
    size = max(1, min(MOST_NUMBERS // ranks, most or num_steps))
    for first in range(0, num_steps, size):
        yield range(first, min(first + size, num_steps))


def _drawn(
    steps: Steps, noise: Noise, hosts: Array, chunk: range, random: np.random.Generator
) -> tuple[Array, NDArray[np.int64]]:
    """Return (factor on computing times, number of the plan's step) of each step of a chunk."""
    shape = len(chunk), len(hosts)
    factor = noise.ratios[random.integers(len(noise.ratios), size=shape)] * hosts
    return factor, np.arange(chunk.start, chunk.stop, dtype=np.int64) % len(steps.compute_s)


def _together(
    steps: Steps, noise: Noise, hosts: Array, meeting: Gradients | Shards, num_steps: int, random: np.random.Generator
) -> Simulated:
    """All ranks meet in every step."""
    seconds, means = [], []
    for chunk in _chunks(num_steps, len(hosts)):
        factor, planned = _drawn(steps, noise, hosts, chunk, random)
        data = steps.data_s[planned]
        compute = steps.compute_s[planned] * factor
        if isinstance(meeting, Shards):
            computed = (data + compute).max(axis=1)
            ended = computed + meeting.exposed_s
        else:
            last = steps.last_s[planned] * factor
            if meeting.seconds and meeting.slow_down > 1:
                # Computing is slowed down while earlier buckets travel, as far as they do beside it.
                more = (meeting.slow_down - 1) * np.minimum(last, sum(meeting.seconds[:-1]))
                compute, last = compute + more, last + more
            own = data + compute
            computed = own.max(axis=1)
            ended = _through_link(own, last, computed, meeting)
        waiting = computed - data.mean(axis=1) - compute.mean(axis=1)
        seconds.append(ended + steps.rest_s)
        means.append([len(chunk), compute.mean(), (ended - computed).mean(), waiting.mean(), data.mean()])
    count, *parts = np.array(means).T
    compute_s, exposed_s, waiting_s, data_s = (float(np.average(part, weights=count)) for part in parts)
    every = np.concatenate(seconds)
    return Simulated(every, np.ones(len(every)), compute_s, exposed_s, waiting_s, data_s, steps.rest_s)


def _through_link(own: Array, last: Array, computed: Array, meeting: Gradients) -> Array:
    """Return when the sums of a step are there: buckets go over the link one after the other."""
    if not meeting.seconds:
        return computed
    free = np.zeros(len(own))
    for number, (link_s, ready) in enumerate(zip(meeting.seconds, meeting.ready, strict=True)):
        is_last = number == len(meeting.seconds) - 1
        complete = computed if is_last else (own - (1.0 - ready) * last).max(axis=1)
        free = np.maximum(free, complete) + link_s
    return free + meeting.host_s


def _apart(
    steps: Steps, noise: Noise, hosts: Array, meeting: Averages, num_steps: int, random: np.random.Generator
) -> Simulated:
    """Ranks meet once in an interval; the average of a moment is applied `overlap` steps later."""
    ranks, interval = len(hosts), max(1, min(meeting.interval, num_steps))
    overlap = min(meeting.overlap, interval)
    free = np.zeros(ranks)
    """When each rank goes on."""
    started: Array | None = None
    """When the average that is under way began on each rank."""
    seconds, weights, blocked, work, data = [], [], 0.0, 0.0, 0.0
    ended_before = 0.0
    num_intervals = max(1, num_steps // interval)
    for number in range(num_intervals):
        own = np.zeros((interval, ranks))
        for chunk in _chunks(interval, ranks):
            factor, planned = _drawn(steps, noise, hosts, range(chunk.start + number, chunk.stop + number), random)
            compute, wait = steps.compute_s[planned] * factor, steps.data_s[planned]
            own[chunk.start : chunk.stop] = compute + wait + steps.rest_s
            work, data = work + compute.sum(), data + wait.sum()
        at = free + np.cumsum(own, axis=0)  # (steps, ranks): end of each step, if nothing is waited for
        if started is not None:
            applied = _applied(started, at, overlap, meeting)
            late = np.maximum(0.0, applied - at[overlap - 1]) + meeting.host_s / 2
            blocked += late.sum()
            at = at + late  # the steps before it are over; only the last is looked at
        ends = at[-1]
        if overlap:
            started = ends + meeting.host_s / 2
            blocked += ranks * meeting.host_s / 2
            free = started
        else:
            free = np.full(ranks, ends.max() + meeting.first_s + meeting.second_s + meeting.host_s)
            blocked += (free - ends).sum()
        seconds.append((free.mean() - ended_before) / interval)
        weights.append(interval)
        ended_before = free.mean()
    total = num_intervals * interval * ranks
    compute_s, data_s, blocked_s = work / total, data / total, blocked / total
    per_meeting = meeting.host_s if overlap else meeting.first_s + meeting.second_s + meeting.host_s
    exposed_s = min(blocked_s, per_meeting / interval)
    if overlap:  # what is waited for beyond the copies is the link, and ranks that began late
        exposed_s = blocked_s
    waiting_s = blocked_s - exposed_s
    return Simulated(np.array(seconds), np.array(weights, float), compute_s, exposed_s, waiting_s, data_s, steps.rest_s)


def _applied(started: Array, at: Array, overlap: int, meeting: Averages) -> float:
    """Return when an average can be applied: its second hop begins between two steps, on the last of the ranks."""
    first_done = started.max() + meeting.first_s
    if not meeting.second_s:
        return float(first_done)
    looked = np.concatenate([at[:overlap], np.maximum(at[overlap - 1 : overlap], first_done)])
    hop_began = np.where(looked >= first_done, looked, np.inf).min(axis=0)
    return float(hop_began.max() + meeting.second_s)


# -- failures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """Failures of a job, and what each costs."""

    per_s: float
    """Failures of the whole job in a second."""
    recovery_s: float
    """From a failure until the ranks step again."""
    save_s: float
    """Cost of a checkpoint to the steps."""
    save_every_s: float
    """Seconds of work between two checkpoints."""
    survives: bool = False
    """Survivors go on from where they are; else the run goes back to its last checkpoint."""


@dataclass(frozen=True)
class Disturbed:
    """A run with failures."""

    total_s: float
    useful_s: float
    num_failures: int
    num_saves: int
    lost_s: float
    """Work that was done again."""

    @property
    def goodput(self) -> float:
        return self.useful_s / self.total_s


def disturb(simulated: Simulated, faults: Faults, seed: int = 0) -> Disturbed:
    """Return how the same steps go where ranks fail at random moments, at a constant rate."""
    work = np.cumsum(simulated.seconds * simulated.weights)
    useful_s, random = float(work[-1]), np.random.Generator(np.random.Philox(key=(seed + 1) % 2**64))
    saves_so_far = np.floor(work / faults.save_every_s)
    done = work + faults.save_s * saves_so_far  # seconds until the end of each step, without failures
    saved_at = np.flatnonzero(np.diff(saves_so_far, prepend=0.0) > 0)  # steps after which there is a checkpoint
    place, began, offset, failed_at = 0, 0.0, 0.0, 0.0
    num_failures, lost_s = 0, 0.0
    while faults.per_s > 0:
        failed_at += random.exponential(1.0 / faults.per_s)
        if failed_at < began:  # while it was recovering: that begins anew
            began, num_failures = failed_at + faults.recovery_s, num_failures + 1
        else:
            reached = int(np.searchsorted(done, offset + failed_at - began, side="right"))
            if reached >= len(done):
                break
            num_failures += 1
            before = int(np.searchsorted(saved_at, reached, side="left"))
            saved = int(saved_at[before - 1]) + 1 if before else 0
            place = max(place, reached) if faults.survives else saved
            offset = float(done[place - 1]) if place else 0.0
            lost_s += (float(done[reached - 1]) if reached else 0.0) - offset
            began = failed_at + faults.recovery_s
        if num_failures == MOST_FAILURES:
            return Disturbed(np.inf, useful_s, num_failures, 0, lost_s)
    total_s = began + float(done[-1]) - offset
    return Disturbed(total_s, useful_s, num_failures, int(saves_so_far[-1]), max(0.0, lost_s))
