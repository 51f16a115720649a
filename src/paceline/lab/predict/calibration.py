"""What the journal of a run says about its steps, as far as their speed on other ranks depends on it.

    compute of a rank in a step    a (number of its grains) + b (their padded cost), times noise
    data                           wait per sample that a rank reads
    update, logging                the same in every step

Of several runs of one task, the one on fewest ranks gives the computing times and the one on most ranks the cost of
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import Conflict, NotFound, Unreadable
from paceline.core.paths import near
from paceline.core.run_folder import METRICS, BrokenRecord, JournalRecords, RunRecord, read_journal, read_record
from paceline.core.sum_tree import even_starts
from paceline.data.partition import MIN_GRAIN, assign, assign_blocks, most_grains
from paceline.lab.predict.communication import LinkSpeed
from paceline.observe.records import EpochRecord, Profile, RanksRecord

Array = NDArray[np.float64]
WARM_STEPS = 5
"""First steps of a run, which fill caches and compile."""
MIN_STEPS = 4
UNEVEN = 0.05
"""Minimum spread of the costs of grains for which their fixed part can be separated from the rest."""


@dataclass(frozen=True)
class Reduction:
    """Settings of the reduction of gradients or parameters."""

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
        return self.sums != "fast" and self.reduce == "grad" and self.wire == "full"


@dataclass(frozen=True)
class MeasuredRun:
    """Sampled steps of one run; arrays are (ranks, steps)."""

    name: str
    ranks: int
    nodes: int
    grains: int
    reduction: Reduction
    costs: Sequence[Sequence[float]]
    """Of these steps: costs of all grains of the global batch, which do not depend on the number of ranks."""
    data_s: Array
    compute_s: Array
    communication_s: Array
    update_s: Array
    other_s: Array
    meeting_s: float
    """Communication per step over whole epochs, minimum over the ranks."""

    @property
    def step_s(self) -> Array:
        return self.data_s + self.compute_s + self.communication_s + self.update_s + self.other_s


@dataclass(frozen=True)
class Calibration:
    """Measurements of which a prediction is made."""

    runs: Sequence[MeasuredRun]
    """From the fewest ranks to the most."""
    grain_s: float
    """Fixed seconds of a grain."""
    cost_s: float
    """Seconds per unit of cost."""
    ratios: Array
    """Measured computing times divided by the times that these two give; their mean is 1."""
    profile: Profile
    has_asked_grains: bool
    """`grains` were set; otherwise a run has one per rank."""
    global_batch: float
    """Samples of a step, mean."""
    total_steps: int | None = None
    """Steps of the whole run, if known."""
    link: LinkSpeed | None = None
    """Link between the ranks of the runs, if known."""
    save_s: float | None = None
    """Time that a checkpoint costs the steps."""
    recovery_s: float | None = None
    """Measured recovery from a lost rank."""
    core_wait: float = 0.0
    """Share of the time in which a rank was ready but had no core."""

    @property
    def name(self) -> str:
        return " and ".join(run.name for run in self.runs)


def calibrate(folders: Sequence[Path], link: LinkSpeed | None = None) -> Calibration:
    """Return the calibration from runs of one task, such as one on 1 and one on 2 ranks, which `link` connected."""
    read = sorted((_read(folder) for folder in folders), key=lambda each: each.run.ranks)
    base = read[0]
    for other in read[1:]:
        _check_alike(base, other)
    alike = [each.run for each in read if each.run.ranks == base.run.ranks]
    grains = np.concatenate([_dealt(run, base.profile)[0].ravel() for run in alike])
    work = np.concatenate([_dealt(run, base.profile)[1].ravel() for run in alike])
    seconds = np.concatenate([run.compute_s.ravel() for run in alike])
    busy = grains > 0
    grain_s, cost_s = _grain_times(grains[busy], work[busy], seconds[busy])
    return Calibration(
        runs=[each.run for each in read],
        grain_s=grain_s,
        cost_s=cost_s,
        ratios=seconds[busy] / (grain_s * grains[busy] + cost_s * work[busy]),
        profile=base.profile,
        has_asked_grains=base.record.settings.get("grains") is not None,
        global_batch=base.batch,
        total_steps=_total_steps(base),
        link=link,
        save_s=_known_mean([_save_s(each) for each in read]),
        recovery_s=_known_mean([_recovery_s(each) for each in read]),
        core_wait=max(_core_wait(each.epochs[-1]) for each in read),
    )


def deal(costs: Sequence[float], ranks: int, *, in_blocks: bool) -> tuple[Array, Array]:
    """Return (grains, cost) of each rank for one step, as the plan deals them."""
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
    if ranks >= len(costs):  # one each
        return (*range(len(costs)), *[len(costs)] * (ranks + 1 - len(costs)))
    return even_starts(len(costs), ranks) if min(costs) == max(costs) else assign_blocks(costs, ranks)


def recut(costs: Sequence[float], batch: float, grains: int) -> list[float]:
    """Return the costs of a step with another number of grains: the same work in equal parts."""
    number = most_grains(max(MIN_GRAIN, round(batch)), grains)
    return list(costs) if number == len(costs) else [sum(costs) / number] * number


# -- reading a run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    folder: Path
    record: RunRecord
    journal: JournalRecords
    epochs: Sequence[EpochRecord]
    """With sampled steps, on as many ranks as the last of them."""
    profile: Profile
    batch: float
    """Samples of a step."""
    run: MeasuredRun


def _read(folder: Path) -> _Read:
    try:
        record = read_record(folder)
    except (FileNotFoundError, BrokenRecord) as error:
        why = "there is no such folder" if not folder.exists() else "it has no run.json"
        raise NotFound(
            f"{near(folder)} is not a run: {error if isinstance(error, BrokenRecord) else why}",
            hint="`paceline runs` lists runs; to predict a task, train it for a few steps first: "
            "`paceline train TASK --steps 40 --grains 8 --out runs/short`",
        ) from error
    journal = read_journal(folder / METRICS)
    if not journal.epochs:
        raise _unusable(folder, "it stopped before the end of its first epoch" if journal.steps else "it has no steps")
    every = [EpochRecord.from_json(line) for line in journal.epochs]
    ranks = next((len(each.profile.steps) for each in reversed(every) if each.profile and each.profile.steps), 0)
    epochs = [each for each in every if each.profile is not None and len(each.profile.steps) == ranks]
    if not ranks or not epochs:
        raise _unusable(folder, "its journal has no sampled steps, as those of earlier versions")
    last = epochs[-1]
    assert last.profile is not None
    if not last.profile.buckets:
        raise _unusable(folder, "its journal has no sizes of the model")
    batch = (last.samples or 0) / max(1, last.steps)
    return _Read(folder, record, journal, epochs, last.profile, batch, _measured(folder, record, epochs, batch, ranks))


def _unusable(folder: Path, why: str) -> Unreadable:
    return Unreadable(
        f"{near(folder)} cannot be predicted from: {why}",
        hint="train an epoch of 10 steps or more with this version: `paceline train TASK --steps 40 --out runs/short`",
    )


def _measured(folder: Path, record: RunRecord, epochs: Sequence[EpochRecord], batch: float, ranks: int) -> MeasuredRun:
    """Return the sampled steps of all ranks without the first steps of the run."""
    grains = record.grains or ranks
    even = [batch / grains] * most_grains(max(1, round(batch)), grains)
    rows: list[list[list[float]]] = []  # (steps, ranks, parts)
    costs: list[list[float]] = []
    for epoch in epochs[1:] or epochs:  # later epochs are warm
        profile = epoch.profile
        assert profile is not None
        count = min(len(rank) for rank in profile.steps)
        for step in range(min(WARM_STEPS, count // 2) if len(epochs) == 1 else 0, count):
            costs.append(list(profile.costs[step]) if step < len(profile.costs) else even)
            rows.append([[*rank[step], *[0.0] * (7 - len(rank[step]))] for rank in profile.steps])
    if len(rows) < MIN_STEPS:
        raise _unusable(folder, f"it has fewer than {MIN_STEPS} sampled steps")
    table = np.array(rows).transpose(2, 1, 0)
    warm = epochs[1:] or epochs
    meetings = [sum(epoch.seconds[rank]["communication"] for epoch in warm) for rank in range(len(warm[0].seconds))]
    return MeasuredRun(
        folder.name or str(folder),
        ranks,
        len(set(epochs[-1].hosts or ["here"])),
        grains,
        Reduction(
            **{
                name: record.settings[name]
                for name in Reduction.__dataclass_fields__
                if record.settings.get(name) is not None
            }
        ),
        costs,
        data_s=table[1] + table[2],
        compute_s=table[3],
        communication_s=table[4],
        update_s=table[5],
        other_s=table[6],
        meeting_s=min(meetings, default=0.0) / max(1, sum(epoch.steps for epoch in warm)),
    )


def _check_alike(first: _Read, other: _Read) -> None:
    pairs = {
        "task": (first.record.task, other.record.task),
        "size of the model": (first.profile.weights, other.profile.weights),
        "device": (first.profile.device, other.profile.device),
    }
    if abs(other.batch - first.batch) > 0.02 * first.batch:
        pairs["number of samples per step"] = (f"{first.batch:g}", f"{other.batch:g}")
    for what, (one, two) in pairs.items():
        if one != two:
            raise Conflict(
                f"{first.run.name} and {other.run.name} have a different {what} ({one}, {two})",
                hint="give runs of one task and one `--global-batch` that differ in ranks, or one run alone",
            )


def _dealt(run: MeasuredRun, profile: Profile) -> tuple[Array, Array]:
    shares = [deal(step, run.ranks, in_blocks=profile.in_blocks) for step in run.costs]
    return np.array([grains for grains, _ in shares]).T, np.array([work for _, work in shares]).T


def _grain_times(grains: Array, work: Array, seconds: Array) -> tuple[float, float]:
    """Return (fixed seconds of a grain, seconds per unit of its cost), by least squares where both can be separated."""
    proportional = 0.0, float(seconds.sum() / work.sum())
    each = work / grains
    if each.std() < UNEVEN * each.mean():
        return proportional
    # In relative terms: noise grows with the time.
    solution, *_ = np.linalg.lstsq(np.stack([grains, work], axis=1) / seconds[:, None], np.ones(len(seconds)))
    if solution.min() < 0:
        return proportional
    grain_s, cost_s = solution * seconds.sum() / (solution[0] * grains + solution[1] * work).sum()
    return float(grain_s), float(cost_s)


def _total_steps(read: _Read) -> int | None:
    """Return the steps of the whole run, from its progress or its settings."""
    looks = [look for look in read.journal.progress if isinstance(look.get("done"), float) and 0 < look["done"] <= 1]
    if looks and looks[-1].get("step", -1) >= 0:
        total: int = round((looks[-1]["step"] + 1) / looks[-1]["done"])
        return total
    settings = read.record.settings
    per_epoch = read.profile.epoch_steps or max(epoch.steps for epoch in read.epochs)
    ends = [settings.get("steps"), per_epoch * (settings.get("epochs") or 0)]
    return min((int(end) for end in ends if end), default=None)


def _save_s(read: _Read) -> float | None:
    """Return the time that a checkpoint costs the steps, where one is saved per epoch."""
    if read.record.settings.get("save_every_steps") or not read.record.settings.get("save_every_epochs"):
        return None
    seconds = [epoch.between[0].get("checkpoint", 0.0) for epoch in read.epochs[1:] if epoch.between]
    return float(np.median(seconds)) if seconds and max(seconds) > 0 else None


def _recovery_s(read: _Read) -> float | None:
    records = [RanksRecord.from_json(line) for line in read.journal.ranks]
    seconds = [each.seconds for each in records if each is not None and each.lost and each.seconds > 0]
    return float(np.median(seconds)) if seconds else None


def _core_wait(epoch: EpochRecord) -> float:
    ranks = zip(epoch.core_wait, epoch.seconds, strict=False)
    return max(((wait or 0.0) / (sum(seconds.values()) or 1.0) for wait, seconds in ranks), default=0.0)


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
