"""Calibration: what the journal of a run tells about its steps, as far as their speed elsewhere depends on it.

    compute of a rank in a step    a (number of its grains) + b (their padded cost), times noise, times its machine
    last backward                  measured in some steps, with the moments at which buckets are complete
    data                           wait per sample that a rank reads
    update, logging                the same in every step

Several runs of one task tell more than one: the one on fewest ranks has the computing times, the one on most ranks has
what meetings take (`prediction.py` compares it with the model's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.run_folder import METRICS, BrokenRecord, JournalRecords, RunRecord, read_journal, read_record
from paceline.core.sum_tree import even_starts
from paceline.data.partition import MIN_GRAIN, assign, assign_blocks, most_grains
from paceline.lab.predict.links import LinkSpeed
from paceline.observe.records import EpochRecord, Profile, RanksRecord

Array = NDArray[np.float64]
WARM_STEPS = 5
"""First steps of a run, which fill caches and compile."""
LEAST_STEPS = 4
"""Steps without which there is nothing to calibrate on."""
SLOW_HOST = 0.03
"""A machine is slower than others from here on; less is noise."""
UNEVEN = 0.05
"""Spread of the costs of grains from which on their fixed part can be told from the rest."""


class NoProfile(PacelineError):
    """A run without sampled steps."""

    folder: Path
    why: str
    sentence = "{shown} cannot be predicted from: {why}"
    hint = (
        "let it train an epoch of 10 steps or more with this version, or give the task instead: `paceline predict TASK`"
    )

    @property
    def shown(self) -> str:
        return near(self.folder)


class NoRun(PacelineError):
    """Nothing that could be read as a run."""

    folder: Path
    why: str
    sentence = "{shown} is no run: {why}"
    hint = "`paceline runs` lists runs; a task to calibrate on goes by its name, such as `paceline predict digits`"

    @property
    def shown(self) -> str:
        return near(self.folder)


class OtherRun(PacelineError):
    """Runs that are not of one task and batch."""

    first: str
    other: str
    what: str
    sentence = "{first} and {other} cannot be predicted from together: they differ in {what}"
    hint = "give runs of one task and one `--global-batch` that differ in ranks, or one run alone"


@dataclass(frozen=True)
class Manner:
    """Settings of how ranks come to one model."""

    reduce: str = "grad"
    sums: str = "exact"
    wire: str = "full"
    shard: str = "none"
    sync_step: int | None = None
    sync_seconds: float | None = None
    sync_overlap: int = 0
    sync_state: str = "average"

    @property
    def is_exact(self) -> bool:
        """Sums have one order."""
        return self.sums != "fast" and self.reduce == "grad" and self.wire == "full"


@dataclass(frozen=True)
class StepSamples:
    """Sampled steps of one rank; arrays are by step."""

    work: Array
    """Padded cost of its grains: samples x longest, or samples."""
    num_grains: Array
    data_s: Array
    compute_s: Array
    """Forward and backward of all grains."""
    communication_s: Array
    """Waiting for other ranks."""
    update_s: Array
    other_s: Array

    @property
    def step_s(self) -> Array:
        return self.data_s + self.compute_s + self.communication_s + self.update_s + self.other_s


@dataclass(frozen=True)
class MeasuredRun:
    """Steps of one run, and how its ranks met."""

    name: str
    ranks: int
    nodes: int
    grains: int
    manner: Manner
    samples: Sequence[StepSamples]
    """By rank."""
    costs: Sequence[Sequence[float]]
    """Of these steps: costs of all grains of the global batch, which do not depend on the number of ranks."""
    backward_s: float | None
    """Last backward of a step, in which buckets are sent."""
    meeting_s: float
    """Communication per step over whole epochs, of the rank that had least."""


@dataclass(frozen=True)
class Calibration:
    """Measurements that a prediction is made of."""

    runs: Sequence[MeasuredRun]
    """From the fewest ranks to the most."""
    device: str
    """`cpu` or `cuda`."""
    grain_s: float
    """Fixed seconds of a grain."""
    cost_s: float
    """Seconds per unit of cost."""
    ratios: Array
    """Measured computing times over those that these give, of machines of the same speed; their mean is 1."""
    hosts: Array
    """Speed of each machine, as a factor on its times; 1 where none is slower."""
    backward_share: float
    """Last backward, of its grain's time."""
    bucket_ready: Sequence[float]
    """Share of the last backward after which each bucket is complete."""
    slow_down: float | None
    """Factor on computing beside communication; None where it was not measured."""
    data_s: float
    """Wait for data per sample of a rank."""
    rest_s: float
    update_s: float
    grains: int
    has_asked_grains: bool
    """`grains` were set; else a run has one per rank."""
    global_batch: float
    """Samples of a step, mean."""
    total_steps: int | None
    """Steps of the whole run, where that is known."""
    num_steps: int
    """Steps that the run on most ranks has done."""
    profile: Profile
    link: LinkSpeed | None
    """Over which the ranks of the runs met, where that is known."""
    save_s: float | None
    """Cost of a checkpoint to the steps."""
    recovery_s: float | None
    """Measured recovery from a lost rank."""
    core_wait: float
    """Share of the time in which ranks could have gone on, but had no core."""

    @property
    def name(self) -> str:
        return " and ".join(run.name for run in self.runs)

    @property
    def manner(self) -> Manner:
        return self.runs[-1].manner

    @property
    def costs(self) -> Sequence[Sequence[float]]:
        return self.runs[0].costs

    @property
    def num_samples(self) -> int:
        """Steps that were sampled on all ranks together."""
        return sum(len(rank.compute_s) for run in self.runs for rank in run.samples)


def calibrate(folders: Sequence[Path], link: LinkSpeed | None = None) -> Calibration:
    """Return the calibration of runs of one task, such as one on 1 rank and one on 2; `link` is the one they used."""
    read = sorted((_read(folder) for folder in folders), key=lambda each: each.run.ranks)
    _check_alike(read)
    base = read[0]
    if not base.profile.buckets:
        raise NoProfile(base.folder, "its journal has no sizes of the model")
    grain_s, cost_s = _grain_times([each.run for each in read if each.run.ranks == base.run.ranks])
    ratios, hosts = _spread(base.run, grain_s, cost_s)
    share, ready = _backward(read, grain_s, cost_s)
    samples = base.run.samples
    return Calibration(
        runs=[each.run for each in read],
        device=base.profile.device,
        grain_s=grain_s,
        cost_s=cost_s,
        ratios=ratios,
        hosts=hosts,
        backward_share=share,
        bucket_ready=ready,
        slow_down=_slow_down([each.run for each in read]),
        data_s=float(np.mean([rank.data_s.mean() for rank in samples])) * base.run.ranks / base.global_batch,
        rest_s=float(np.mean([rank.other_s.mean() for rank in samples])),
        update_s=float(np.mean([np.median(rank.update_s) for rank in samples])),
        grains=base.run.grains,
        has_asked_grains=base.has_asked_grains,
        global_batch=base.global_batch,
        total_steps=base.total_steps,
        num_steps=read[-1].num_steps,
        profile=base.profile,
        link=link,
        save_s=_known_mean([each.save_s for each in read]),
        recovery_s=_known_mean([each.recovery_s for each in read]),
        core_wait=max(each.core_wait for each in read),
    )


# -- what a run has ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ReadRun:
    folder: Path
    run: MeasuredRun
    profile: Profile
    task: str | None
    has_asked_grains: bool
    global_batch: float
    total_steps: int | None
    num_steps: int
    save_s: float | None
    recovery_s: float | None
    core_wait: float
    ready_s: Sequence[float]


def _read(folder: Path) -> _ReadRun:
    record = _run_record(folder)
    journal = _journal_of_epochs(folder)
    epochs = [EpochRecord.from_json(line) for line in journal.epochs]
    sampled = _sampled_epochs(folder, epochs)
    last = sampled[-1]
    assert last.profile is not None
    batch = (last.samples or 0) / max(1, last.steps)
    watched = _watched_backward(sampled)
    return _ReadRun(
        folder,
        _measured_run(folder, record, sampled, batch, watched),
        last.profile,
        record.task,
        record.settings.get("grains") is not None,
        batch,
        _total_steps(record, journal, epochs),
        last.step + 1,
        _save_s(epochs, record.settings),
        _recovery_s(journal),
        _core_wait(last),
        [] if watched is None else watched.ready_s,
    )


def _run_record(folder: Path) -> RunRecord:
    try:
        return read_record(folder)
    except FileNotFoundError as error:
        why = "there is no such folder" if not folder.exists() else "it has no run.json"
        raise NoRun(folder, why) from error
    except BrokenRecord as error:
        raise NoRun(folder, str(error)) from error


def _journal_of_epochs(folder: Path) -> JournalRecords:
    """Return the journal of a run that has ended an epoch."""
    journal = read_journal(folder / METRICS)
    if not journal.steps and not journal.epochs:
        raise NoProfile(folder, "its journal has no steps")
    if not journal.epochs:
        raise NoProfile(folder, "it was ended before its first epoch was, and the journal has times of whole epochs")
    return journal


def _sampled_epochs(folder: Path, epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
    """Return the epochs with sampled steps that ran on as many ranks as the last of them."""
    num_ranks = [0 if epoch.profile is None else len(epoch.profile.steps) for epoch in epochs]
    ranks = next((number for number in reversed(num_ranks) if number), None)
    if ranks is None:
        raise NoProfile(folder, "its journal has no sampled steps, as those of earlier versions")
    return [epoch for epoch, number in zip(epochs, num_ranks, strict=True) if number == ranks]


def _watched_backward(epochs: Sequence[EpochRecord]) -> Profile | None:
    """Return the first profile in which the last backward of a step was measured."""
    return next((epoch.profile for epoch in epochs if epoch.profile and epoch.profile.backward_s), None)


def _measured_run(
    folder: Path, record: RunRecord, epochs: Sequence[EpochRecord], batch: float, watched: Profile | None
) -> MeasuredRun:
    last = epochs[-1]
    assert last.profile is not None
    ranks = len(last.profile.steps)
    grains = record.grains or ranks
    samples, costs = _samples(epochs, batch, grains, ranks)
    if min((len(rank.compute_s) for rank in samples), default=0) < LEAST_STEPS:
        raise NoProfile(folder, f"it has fewer than {LEAST_STEPS} sampled steps")
    return MeasuredRun(
        name=folder.name or str(folder),
        ranks=ranks,
        nodes=len(set(last.hosts or ["here"])),
        grains=grains,
        manner=_manner(record.settings),
        samples=samples,
        costs=costs,
        backward_s=None if watched is None else watched.backward_s,
        meeting_s=_meeting_s(epochs),
    )


def _core_wait(epoch: EpochRecord) -> float:
    """Return the share of its time that a rank had no core, of the rank that waited most."""
    ranks = zip(epoch.core_wait, epoch.seconds, strict=False)
    return max(((wait or 0.0) / (sum(seconds.values()) or 1.0) for wait, seconds in ranks), default=0.0)


def _meeting_s(epochs: Sequence[EpochRecord]) -> float:
    warm = epochs[1:] or epochs
    ranks = [sum(epoch.seconds[rank]["communication"] for epoch in warm) for rank in range(len(warm[0].seconds))]
    return min(ranks, default=0.0) / max(1, sum(epoch.steps for epoch in warm))


def _manner(settings: Mapping[str, Any]) -> Manner:
    known = {name: settings[name] for name in Manner.__dataclass_fields__ if settings.get(name) is not None}
    return Manner(**known)


def _samples(
    epochs: Sequence[EpochRecord], batch: float, grains: int, ranks: int
) -> tuple[list[StepSamples], list[list[float]]]:
    """Return the sampled steps of each rank, and the costs of all grains in them; not those of a run's first steps."""
    rows: list[list[list[float]]] = [[] for _ in range(ranks)]
    costs: list[list[float]] = []
    for number, epoch in enumerate(epochs):
        profile = epoch.profile
        assert profile is not None
        count = min(len(rank) for rank in profile.steps)
        even = [batch / grains] * most_grains(max(1, round(batch)), grains)
        first = min(WARM_STEPS, count // 2) if number == 0 else 0
        if number == 0 and len(epochs) > 1:
            first = count  # later epochs are warm
        for place in range(first, count):
            costs.append(list(profile.costs[place]) if place < len(profile.costs) else even)
            for rank in range(ranks):
                row = list(profile.steps[rank][place])
                rows[rank].append([*row, *[0.0] * (7 - len(row))])
    in_blocks = bool(epochs and epochs[-1].profile and epochs[-1].profile.in_blocks)
    shares = [deal(step, ranks, in_blocks=in_blocks) for step in costs]
    samples = []
    for rank in range(ranks):
        table = np.array(rows[rank], dtype=np.float64).reshape(-1, 7)
        samples.append(
            StepSamples(
                work=np.array([work[rank] for _, work in shares]),
                num_grains=np.array([number[rank] for number, _ in shares]),
                data_s=table[:, 1] + table[:, 2],
                compute_s=table[:, 3],
                communication_s=table[:, 4],
                update_s=table[:, 5],
                other_s=table[:, 6],
            )
        )
    return samples, costs


def deal(costs: Sequence[float], ranks: int, *, in_blocks: bool) -> tuple[Array, Array]:
    """Return (grains, cost) of each rank for one step: exactly as the plan deals them."""
    if in_blocks:
        ends = np.array(starts_of(costs, ranks))
        running = np.concatenate(([0.0], np.cumsum(costs)))
        return np.diff(ends).astype(np.float64), np.diff(running[ends])
    held = assign(costs, ranks)
    return (
        np.array([float(len(numbers)) for numbers in held]),
        np.array([sum(costs[number] for number in numbers) for numbers in held]),
    )


def starts_of(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Return the first grain of each rank, where grains are dealt in blocks."""
    if ranks >= len(costs):  # one each; the search for few partial sums has nothing to find
        return (*range(len(costs)), *[len(costs)] * (ranks + 1 - len(costs)))
    return even_starts(len(costs), ranks) if min(costs) == max(costs) else assign_blocks(costs, ranks)


def _total_steps(record: RunRecord, journal: JournalRecords, epochs: Sequence[EpochRecord]) -> int | None:
    """Return the steps of the whole run, as its settings or its progress say."""
    steps, number = record.settings.get("steps"), record.settings.get("epochs")
    known = [look for look in journal.progress if isinstance(look.get("done"), float) and 0 < look["done"] <= 1]
    if known and known[-1].get("step", -1) >= 0:
        total: int = round((known[-1]["step"] + 1) / known[-1]["done"])
        return total
    planned = max((epoch.profile.epoch_steps for epoch in epochs if epoch.profile is not None), default=0)
    per_epoch = planned or max((epoch.steps for epoch in epochs), default=0)
    ends = [steps, number and per_epoch and number * per_epoch]
    return min((int(end) for end in ends if end), default=None)


def _save_s(epochs: Sequence[EpochRecord], settings: Mapping[str, Any]) -> float | None:
    """Return the cost of a checkpoint to the steps, where they are saved once an epoch."""
    if settings.get("save_every_steps") or not settings.get("save_every_epochs"):
        return None
    found = [epoch.between[0].get("checkpoint", 0.0) for epoch in epochs[1:] if epoch.between]
    return float(np.median(found)) if found and max(found) > 0 else None


def _recovery_s(journal: JournalRecords) -> float | None:
    records = [RanksRecord.from_json(line) for line in journal.ranks]
    seconds = [each.seconds for each in records if each is not None and each.lost and each.seconds > 0]
    return float(np.median(seconds)) if seconds else None


def _check_alike(read: Sequence[_ReadRun]) -> None:
    first = read[0]
    for other in read[1:]:
        what = None
        if other.task != first.task:
            what = f"their task ({first.task}, {other.task})"
        elif abs(other.global_batch - first.global_batch) > 0.02 * first.global_batch:
            what = f"the samples of a step ({first.global_batch:g}, {other.global_batch:g})"
        elif other.profile.weights != first.profile.weights:
            what = f"the size of the model ({first.profile.weights:,}, {other.profile.weights:,} weights)"
        elif other.profile.device != first.profile.device:
            what = f"the device ({first.profile.device}, {other.profile.device})"
        if what is not None:
            raise OtherRun(first.run.name, other.run.name, what)


# -- what it means -----------------------------------------------------------------------------------------------------


def _grain_times(runs: Sequence[MeasuredRun]) -> tuple[float, float]:
    """Return (fixed seconds of a grain, seconds per unit of its cost), by least squares where both can be told."""
    ranks = [rank for run in runs for rank in run.samples]
    grains = np.concatenate([rank.num_grains for rank in ranks])
    work = np.concatenate([rank.work for rank in ranks])
    seconds = np.concatenate([rank.compute_s for rank in ranks])
    busy = grains > 0
    grains, work, seconds = grains[busy], work[busy], seconds[busy]
    proportional = 0.0, float(seconds.mean() / work.mean())
    each = work / grains
    if each.std() < UNEVEN * each.mean():
        return proportional
    # In relative terms: noise grows with what it is on.
    table = np.stack([grains, work], axis=1) / seconds[:, None]
    solution, *_ = np.linalg.lstsq(table, np.ones(len(seconds)), rcond=None)
    grain_s, cost_s = (float(value) for value in solution)
    if grain_s < 0 or cost_s < 0:
        return proportional
    scale = float(seconds.sum() / (grain_s * grains + cost_s * work).sum())
    return scale * grain_s, scale * cost_s


def _spread(run: MeasuredRun, grain_s: float, cost_s: float) -> tuple[Array, Array]:
    """Return (noise of single steps, factors of the machines)."""
    ratios = []
    for rank in run.samples:
        expected = grain_s * rank.num_grains + cost_s * rank.work
        busy = expected > 0
        if busy.any():
            ratios.append(rank.compute_s[busy] / expected[busy])
    typical = float(np.median([np.median(each) for each in ratios]))
    hosts = np.array([float(np.median(each)) / typical for each in ratios])
    hosts = np.where(np.abs(hosts - 1) < SLOW_HOST, 1.0, hosts)
    noise = np.concatenate([each / host for each, host in zip(ratios, hosts, strict=True)])
    scale = float(np.mean([each.mean() for each in ratios])) / (noise.mean() * hosts.mean())
    return noise * scale, hosts


def _backward(read: Sequence[_ReadRun], grain_s: float, cost_s: float) -> tuple[float, list[float]]:
    """Return (last backward as a share of its grain, share of it after which each bucket is complete)."""
    base = read[0]
    watched = next((each for each in read if each.run.backward_s), None)
    buckets = base.profile.buckets
    if watched is None:
        # Not measured (a GPU, compiled): backward is two thirds of a grain, and gradients come as bytes do.
        total = sum(buckets) or 1
        return 2 / 3, [float(value) / total for value in np.cumsum(buckets)]
    assert watched.run.backward_s is not None
    costs = [cost for step in watched.run.costs for cost in step]
    typical = grain_s + cost_s * float(np.mean(costs))
    share = min(0.95, watched.run.backward_s / typical) if typical > 0 else 2 / 3
    return share, [min(1.0, seconds / watched.run.backward_s) for seconds in watched.ready_s]


def _slow_down(runs: Sequence[MeasuredRun]) -> float | None:
    """Return the factor on computing beside communication: the last backward on more ranks, over that on fewer.

    Each is taken relative to the grains of its own run, all of which are slower on a machine that is busier.
    """
    measured = [run for run in runs if run.backward_s]
    if len(measured) < 2 or measured[0].ranks == measured[-1].ranks or measured[0].grains != measured[-1].grains:
        return None
    first, last = (_relative_backward(run) for run in (measured[0], measured[-1]))
    return float(np.clip(last / first, 1.0, 2.0))


def _relative_backward(run: MeasuredRun) -> float:
    grains = np.concatenate([rank.compute_s / np.maximum(rank.num_grains, 1) for rank in run.samples])
    return (run.backward_s or 0.0) / float(np.median(grains))


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def recut(costs: Sequence[float], batch: float, grains: int) -> list[float]:
    """Return the costs of a step's grains if it had so many: the same work in equal parts."""
    number = most_grains(max(MIN_GRAIN, round(batch)), grains)
    return list(costs) if number == len(costs) else [sum(costs) / number] * number
