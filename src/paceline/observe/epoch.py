"""An epoch: what each rank measured of it, joined over launches and then over ranks into its record. Pure.

What earlier launches measured travels in checkpoints, so that the record of a resumed run is of the whole epoch. Only
steps that count are in it: not what a run did after its last checkpoint and does again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.observe.clock import computing_share
from paceline.observe.device_clock import DeviceTime, apportion
from paceline.observe.records import Compilation, CoreShare, DeviceSteps, EpochRecord, Meetings, Memory, Number
from paceline.observe.throughput import Units

# -- rules: how a measurement is joined over launches ------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """Rule by which the measurements of several launches become one value."""

    add: Callable[[Sequence[Any]], Any]
    """From the values of one rank in several launches to one."""
    deal: Callable[[Sequence[Any], int], list[Any]]
    """From the values of all ranks of earlier launches to those of another number of ranks."""


def _known_sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _phase_sums(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: sum(row.get(phase, 0.0) for row in rows) for row in rows for phase in row}


def _deal_phases(rows: Sequence[Mapping[str, float]], number: int) -> list[dict[str, float]]:
    mean = {phase: value / len(rows) for phase, value in _phase_sums(rows).items()}
    return [mean] * number


def _deal_mean(values: Sequence[float | None], number: int) -> list[float | None]:
    total = _known_sum(values)
    return [None if total is None else total / len(values)] * number


def _deal_first(values: Sequence[float | None], number: int) -> list[float | None]:
    total = _known_sum(values)
    return [total, *[None if total is None else 0 * total] * (number - 1)]


def _deal_evenly(values: Sequence[float], number: int) -> list[float]:
    return [sum(values) / number] * number


PHASES_S = Join(_phase_sums, _deal_phases)
"""Seconds by phase. Other ranks get the mean, so that the epoch lasts as long."""
SECONDS = Join(_known_sum, _deal_mean)
"""Seconds. Other ranks get the mean."""
TOTAL = Join(_known_sum, _deal_first)
"""An amount that a record has as the sum over ranks. The first of other ranks gets all of it, so it stays whole."""
SHARE = Join(sum, _deal_evenly)
"""An amount that a record has by rank. Other ranks get equal parts."""


def measured(
    join: Join, default: Any = None, *, number: Number | None = None, ranks: Callable[[Any], Any] = sum
) -> Any:
    """Declare a field of `RankEpoch` that is joined over launches.

    With `number`, the record of the epoch has it under its name, as `ranks` gives it of the values of all ranks, and
    report and loggers show it.
    """
    return field(default=default, metadata={"join": join, "number": number, "ranks": ranks})


# -- measurements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankEpoch:
    """Measurements of one rank in an epoch. Those without a `Join` describe the machine of the last launch."""

    seconds: Mapping[str, float] = field(metadata={"join": PHASES_S})
    """By phase, as its host saw them."""
    between: Mapping[str, float] = field(metadata={"join": PHASES_S})
    """The same since the record of the epoch before."""
    num_samples: int = field(metadata={"join": TOTAL})
    count: float = measured(TOTAL, 0.0)
    """Divisor of its losses."""
    length: float | None = measured(TOTAL)
    """Of its samples together, without padding; None where lengths are not known."""
    work: float = measured(SHARE, 0.0)
    """Amount that it computed: its lengths with their padding, or its samples."""
    core_wait_s: float | None = measured(SECONDS)
    """In which it could have gone on, but had no core; None where the system does not say."""
    sums_s: float = measured(SECONDS, 0.0)
    """That adding in one order has taken of its host, beyond a sum in any order."""
    host_bytes: int = 0
    device_bytes: int | None = None
    waits: Sequence[float] = field(default_factory=list)
    """Seconds at its meetings with the other ranks."""
    steps: Sequence[Sequence[float]] = ()
    """Steps that its clock has kept: see `Clock.steps`."""
    device: DeviceTime | None = None
    recompiles: int | None = None
    """None where nothing is compiled."""
    compile_s: float = 0.0
    cores: Sequence[int] = ()
    """CPU cores that it may run on."""


def _joins(rank: RankEpoch | type[RankEpoch]) -> dict[str, Join]:
    return {each.name: each.metadata["join"] for each in fields(rank) if "join" in each.metadata}


@dataclass(frozen=True)
class EpochSums:
    """Steps of an epoch that are done, by one launch after another."""

    steps: int = 0
    losses: tuple[float, ...] = ()
    """`Mean.parts` of them."""
    num_losses: int = 0
    """Finite ones."""
    skipped: int = 0
    ranks: tuple[RankEpoch, ...] = ()
    """Of the last launch, joined with those before."""

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        ranks = [{name: getattr(rank, name) for name in _joins(rank)} for rank in self.ranks]
        sums = {"steps": self.steps, "losses": list(self.losses), "num_losses": self.num_losses}
        return {**sums, "skipped": self.skipped, "ranks": ranks}

    @classmethod
    def load(cls, state: Mapping[str, Any] | None) -> EpochSums:
        """Return the sums of a `state`; a checkpoint that is older than these sums has none."""
        if not state:
            return cls()
        ranks = tuple(RankEpoch(**rank) for rank in state["ranks"])
        return cls(state["steps"], tuple(state["losses"]), state["num_losses"], state["skipped"], ranks)


class Mean:
    """Mean of the finite ones of many numbers, rounded once: the same however they came in pieces."""

    def __init__(self, parts: Iterable[float] = (), number: int = 0) -> None:
        self._parts, self.number = list(parts), number

    def add(self, numbers: Iterable[float]) -> None:
        finite = [number for number in numbers if math.isfinite(number)]
        self._parts += finite
        self.number += len(finite)

    @property
    def value(self) -> float:
        return math.fsum(self._parts) / self.number if self.number else math.nan

    @property
    def parts(self) -> list[float]:
        """A few numbers with the same sum, exactly: each is what rounding the ones before it has left."""
        few: list[float] = []
        while rest := math.fsum([*self._parts, *(-part for part in few)]):
            few.append(rest)
        self._parts = few
        return list(few)


def join_launches(earlier: Sequence[RankEpoch], ranks: Sequence[RankEpoch]) -> list[RankEpoch]:
    """Join what the ranks of this launch have measured with what those of the launches before had.

    Another number of ranks shares out what was before, as each field's `Join` says.
    """
    now = [replace(rank, seconds=_divided(rank), device=None, waits=[]) for rank in ranks]
    if not earlier:
        return now
    columns: dict[str, list[Any]] = {}
    for name, join in _joins(now[0]).items():
        before = [getattr(rank, name) for rank in earlier]
        if len(before) != len(now):
            before = join.deal(before, len(now))
        columns[name] = [join.add([then, getattr(rank, name)]) for then, rank in zip(before, now, strict=True)]
    rows = ({name: column[place] for name, column in columns.items()} for place in range(len(now)))
    return [replace(rank, **row) for rank, row in zip(now, rows, strict=True)]


# -- the record --------------------------------------------------------------------------------------------------------


def epoch_record(
    ranks: Sequence[RankEpoch], units: Units, *, device: str | None = None, peak_flops: float | None = None
) -> EpochRecord:
    """Return the record of an epoch, as far as it is measured by ranks.

    `device` is the name of the GPU, `peak_flops` what one of them could do in a second.
    """
    seconds = [_divided(rank) for rank in ranks]
    longest = max(sum(rank.values()) for rank in seconds)
    num_samples = sum(rank.num_samples for rank in ranks)
    length = _length(ranks)
    flops_per_s = units.flops_per_s(longest, num_samples, length)
    return EpochRecord(
        samples=num_samples,
        objects_per_s=num_samples / longest,
        core_wait=[rank.core_wait_s for rank in ranks],
        sums=[round(rank.sums_s, 6) for rank in ranks] if any(rank.sums_s for rank in ranks) else None,
        work=[rank.work for rank in ranks],
        computing=computing_share(*seconds),
        seconds=[_rounded(rank) for rank in seconds],
        between=[_rounded(rank.between) for rank in ranks],
        rates=units.rates(longest, num_samples, length, sum(rank.count for rank in ranks)),
        memory=[Memory(rank.host_bytes, rank.device_bytes) for rank in ranks],
        flops_per_s=flops_per_s,
        mfu=None if flops_per_s is None or peak_flops is None else flops_per_s / (peak_flops * len(ranks)),
        meetings=_meetings([rank.waits for rank in ranks], seconds),
        device=None if device is None else _device_steps(device, [rank.device for rank in ranks]),
        compile=_compilation(ranks),
        more=_shown(ranks),
    )


def _length(ranks: Sequence[RankEpoch]) -> float | None:
    lengths = [rank.length for rank in ranks if rank.length is not None]
    return sum(lengths) if lengths else None


def whole_record(ranks: Sequence[RankEpoch], units: Units) -> EpochRecord:
    """Return the record of ranks whose launches are joined; fields that are not `is_whole` mean nothing in it."""
    record = epoch_record(ranks, units)
    joined = _joins(ranks[0])
    return replace(record, more={name: value for name, value in record.more.items() if name in joined})


def _shown(ranks: Sequence[RankEpoch]) -> dict[str, Any]:
    return {
        each.name: each.metadata["ranks"]([getattr(rank, each.name) for rank in ranks])
        for each in fields(ranks[0])
        if each.metadata.get("number")
    }


def _meetings(waits: Sequence[Sequence[float]], seconds: Sequence[Mapping[str, float]]) -> Meetings | None:
    """Return meetings as shares of the ranks' whole time."""
    shares = wait_shares(waits)
    if shares is None:
        return None
    each = [sum(rank.values()) for rank in seconds]
    total, met_s = sum(each), sum(rank["communication"] for rank in seconds)
    return Meetings(
        exchange=met_s / total * shares.exchange,
        waiting=met_s / total * (1 - shares.exchange),
        last=list(shares.last),
        waited_for=[met_s * share / (total - rank_s) for share, rank_s in zip(shares.waited_for, each, strict=True)],
    )


@dataclass(frozen=True)
class WaitShares:
    """Use of the time that ranks spent on each other, in shares of that time."""

    exchange: float
    """In which numbers moved; the rest was waiting for the last rank."""
    last: tuple[float, ...]
    """By rank: share of the meetings to which it came last."""
    waited_for: tuple[float, ...]
    """By rank: in which the others waited for it."""


def wait_shares(waits: Sequence[Sequence[float]]) -> WaitShares | None:
    """Divide each rank's seconds at the same meetings; None where there were none, or only one rank.

    The rank that comes last to a meeting waits for nobody: its wait is what the exchange itself takes. What the others
    wait beyond that, they wait for it.
    """
    together = list(zip(*waits, strict=False))  # a rank that failed to measure its last one has it no more
    total = sum(sum(each) for each in together)
    if len(waits) < 2 or not total:
        return None
    exchange = sum(min(each) * len(each) for each in together)
    last, waited_for = [0] * len(waits), [0.0] * len(waits)
    for each in together:
        rank = each.index(min(each))
        last[rank] += 1
        waited_for[rank] += sum(each) - min(each) * len(each)
    return WaitShares(
        exchange / total,
        tuple(times / len(together) for times in last),
        tuple(seconds / total for seconds in waited_for),
    )


def core_shares(hosts: Sequence[str], cores: Sequence[Iterable[int]]) -> list[CoreShare]:
    """Return, by rank, who shares its cores: ranks of one host whose cores overlap, directly or through others.

    mpirun binds each rank to cores of its own, other launchers let all ranks of a host run on all of its cores.
    """
    groups: list[tuple[set[int], set[tuple[str, int]]]] = []
    for rank, (host, its_cores) in enumerate(zip(hosts, cores, strict=True)):
        places = {(host, core) for core in its_cores}
        joined = [group for group in groups if not places.isdisjoint(group[1])]
        groups = [group for group in groups if group not in joined]
        ranks = {rank}.union(*(group[0] for group in joined))
        groups.append((ranks, places.union(*(group[1] for group in joined))))
    shares = {rank: CoreShare(len(ranks), max(1, len(places))) for ranks, places in groups for rank in ranks}
    return [shares[rank] for rank in range(len(hosts))]


def _device_steps(name: str, times: Sequence[DeviceTime | None]) -> DeviceSteps:
    sampled = [time for time in times if time is not None]
    return DeviceSteps(
        name,
        sampled_steps=min((time.num_steps for time in sampled), default=0),
        ms=[
            {phase: round(1e3 * value / max(1, time.num_steps), 6) for phase, value in time.seconds.items()}
            for time in sampled
        ],
        caught_up=[time.num_caught_up / max(1, time.num_steps) for time in sampled],
    )


def _compilation(ranks: Sequence[RankEpoch]) -> Compilation | None:
    if ranks[0].recompiles is None:
        return None
    slowest = max(ranks, key=lambda rank: rank.recompiles or 0)
    return Compilation(slowest.recompiles or 0, round(slowest.compile_s, 6))


def _divided(rank: RankEpoch) -> Mapping[str, float]:
    """Seconds of a rank by phase, those of its steps as its device has them."""
    return rank.seconds if rank.device is None else apportion(rank.seconds, rank.device)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: round(value, 6) for phase, value in seconds.items()}
