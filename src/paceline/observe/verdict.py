"""Verdict on an epoch: what held it back, and what to type next. A pure function of its record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

from paceline.core.units import counted
from paceline.observe.records import CoreShare, EpochRecord, Finding, Matter, Meetings, Way

Rule = Callable[[EpochRecord], Iterable[Finding]]
"""Finds one kind of thing that can hold a run back."""
LEAST_SECONDS, LEAST_STEPS = 1.0, 10
"""Shortest epoch that is judged."""
DATA_SHARE = 0.10
"""RETURNN's rule: below 90 % computing time, data is the bottleneck."""
NAMED_FROM = 0.05
"""A rank is named when its share is so far above that of the others."""
CORE_WAIT_SHARE = 0.20
EXCHANGE_SHARE = 0.15
WAITING_SHARE = 0.10
LAST_SHARE = 0.75
"""A straggler is last nearly always; two equal ranks are last in turns."""
MORE_WORK = 0.1
"""A rank with so much more to compute than the others is late for that reason."""
PADDING_SHARE = 0.15
RECOMPILES = 3
"""Fewer are usual: the first change of a shape makes the compiler take it as dynamic."""
CAUGHT_UP_SHARE = 0.5
SUMS_SHARE = 0.03
"""Share of the time from which on it is worth to know that sums could be faster."""


def verdict(record: EpochRecord, rules: Sequence[Rule] = ()) -> list[Finding]:
    """Return what held the epoch back, the costliest first; nothing, if nothing did or too little was seen.

    `rules` are those of higher rooms, beside the general ones.
    """
    if not is_judged(record):
        return []
    findings = [finding for rule in (*_RULES, *rules) for finding in rule(record)]
    return sorted(findings, key=lambda finding: -finding.share)


def is_judged(record: EpochRecord) -> bool:
    """Return True if the epoch was long enough to say what held it back."""
    # Of a run that was resumed within this epoch, findings are of what it has done since.
    part = record.launch
    steps, seconds = (record.steps, record.elapsed_s) if part is None else (part.steps, part.seconds)
    return steps >= LEAST_STEPS and seconds >= LEAST_SECONDS


def news(told: Mapping[Matter, float], findings: Sequence[Finding], change: float = 0.1) -> list[Finding]:
    """Return the findings worth saying: not told yet, or by now another matter in size."""
    return [
        finding
        for finding in findings
        if finding.matter not in told or abs(finding.share - told[finding.matter]) >= change
    ]


# -- one function for each thing that can hold a run back --------------------------------------------------------------


def _data(record: EpochRecord) -> Iterator[Finding]:
    rank, share = _worst(_shares(record, "data"))
    if share < DATA_SHARE:
        return
    way, sharing = _way(record), _core_share(record, rank)
    workers = enough_workers(share, way.workers or 0)
    most = max(1, sharing.cores // sharing.ranks)
    more_workers = f"`--workers {min(workers, most)}`"
    is_packed = way.is_packed
    if way.is_stream:
        advice = "an iterable is read by the training process itself: give a data set with `__getitem__` and `__len__`"
    elif (way.workers or 0) < min(workers, most):
        advice = more_workers if is_packed else f"{more_workers}, or `paceline pack`"
    elif is_packed:
        advice = "it is packed already: less to do for each sample, a faster disk, or more cores for `--workers`"
    else:
        advice = "`paceline pack`"
    yield Finding(
        "data", f"data wait {_percent(share)}{_on(record, rank)}", advice, **_place(record, rank), share=share
    )


def enough_workers(share: float, workers: int) -> int:
    """Return the number of workers that keep up with training, where `workers` leave `share` of the time waiting."""
    rest = max(1.0 - share, 1e-3)
    # Without workers reading takes `share` of the time; with some, they read all the time and are still too slow.
    needed = share / rest if workers == 0 else workers / rest
    return max(1, math.ceil(needed - 1e-9))


def _cores(record: EpochRecord) -> Iterator[Finding]:
    """Find missing cores: other processes take time that the clock shows as computing, or as waiting for a rank."""
    rank, share = _worst(_core_wait_shares(record))
    if share < CORE_WAIT_SHARE:
        return
    way, place, sharing = _way(record), _place(record, rank), _core_share(record, rank)
    text = f"no core was free for {_percent(share)} of the time{_on(record, rank)}"
    num_processes, cores = sharing.ranks * (1 + (way.workers or 0)), counted(sharing.cores, "core")
    is_bound = sharing.ranks < way.local_size
    if num_processes > sharing.cores:
        ways = [_UNBIND] * is_bound + ["fewer `--workers`"] * bool(way.workers) + ["fewer `--procs`"] * (not is_bound)
        bound = " that they are bound to" * is_bound
        advice = f"{num_processes} processes of this run share {cores}{bound}: {', or '.join(ways)}"
    elif is_bound:
        advice = f"others run on the {cores} that {'each' if rank is None else 'the'} rank is bound to: {_UNBIND}"
    else:
        advice = f"more runs on {place['host'] or 'each machine'} than its {cores}: see `top`"
    yield Finding("cores", text, advice, **place, share=share)


_UNBIND = "`mpirun --bind-to none` and `srun --cpu-bind none` free the ranks to use all cores"


def _core_share(record: EpochRecord, rank: int | None) -> CoreShare:
    """Return who shares the cores of a rank, or of the first one."""
    if record.core_shares:
        return record.core_shares[rank or 0]
    way = _way(record)  # an older record knows the first rank's cores alone, and nothing of bindings
    return CoreShare(way.local_size, way.cores)


def _communication(record: EpochRecord) -> Iterator[Finding]:
    # Without a core nothing moves either: what may have been that is no fault of the link.
    share = (record.meetings or Meetings()).exchange - max(_core_wait_shares(record))
    if share < EXCHANGE_SHARE:
        return
    way = _way(record)
    what = "sums of gradients" if way.reduce == "grad" else "averages of weights"
    yield Finding("communication", f"{what} take {_percent(share)} of the time", _lighter(way), share=share)


def _lighter(way: Way) -> str:
    """Return settings with which ranks have less to send to each other."""
    if way.shard == "full":
        return "`--shard none`, if the model fits, sends less; or a larger `--global-batch` with more `--grains`"
    if way.reduce == "grad":
        seldom = "`--reduce param --sync-step 100` meets once in 100 steps"
        return f"`--wire bf16` sends half of it; {seldom}" if way.wire == "full" else seldom
    if not way.sync_overlap:
        return "`--sync-overlap 10` goes on stepping meanwhile" + ("" if way.wire == "int8" else "; `--wire int8`")
    if way.wire != "int8":
        return "`--wire int8` sends a quarter of it"
    return f"`--sync-step {2 * way.sync_step}`" if way.sync_step else "a larger `--sync-seconds`"


def _sums(record: EpochRecord) -> Iterator[Finding]:
    """Find sums with one order that cost more than they seem worth."""
    pairs = zip(record.sums or (), record.seconds, strict=False)
    share = max((taken / (sum(rank.values()) or 1.0) for taken, rank in pairs), default=0.0)
    if share < SUMS_SHARE:
        return
    text = f"adding in one order takes {_percent(share)} of the time"
    advice = "fewer `--grains`, or as many per rank as a power of two, have less to add"
    advice += "; a new run with `--sums fast` adds in any order, and its last digits depend on the ranks"
    yield Finding("sums", text, advice, share=share)


def _straggler(record: EpochRecord) -> Iterator[Finding]:
    """Find the rank that others wait for: it waits least, and comes last to nearly every meeting."""
    meetings = record.meetings or Meetings()
    last = meetings.last
    if len(last) < 2 or max(last) < LAST_SHARE:
        return
    rank = max(range(len(last)), key=last.__getitem__)
    share = _waited_for(meetings, rank)
    if share < WAITING_SHARE:
        return
    phase = _slow_phase(record.seconds, rank)
    if phase == "data" and _shares(record, "data")[rank] >= DATA_SHARE:
        return  # that it waits for data has been said, with what to do about it
    host = (record.hosts or [])[rank]
    more = _beyond_others(record.work, rank)
    slower = _beyond_others([each.get("compute", 0.0) for each in record.seconds], rank)
    if phase == "compute" and more >= MORE_WORK and slower < 2 * more:
        text = f"rank {rank} has {_percent(more)} more to compute: others wait {_percent(share)} of their time for it"
        advice = f"`--grains {4 * len(last)}` can be shared out more evenly"
        # Shared out evenly, every rank would compute for as long as all of them together do now, divided by them.
        yield Finding("balance", text, advice, rank, host, share * (len(last) - 1) / len(last))
        return
    why = {"compute": "slower in forward and backward", "data": "longer data wait"}.get(phase, f"longer in {phase}")
    waits = _core_wait_shares(record)
    if max(waits) >= CORE_WAIT_SHARE and share - waits[rank] < WAITING_SHARE:
        return  # a missing core may be all of it, and has been said
    if waits[rank] - statistics.median(waits[:rank] + waits[rank + 1 :]) >= 0.7 * share:
        why = "it had no free core"
    text = f"rank {rank} on {host} is late: others wait {_percent(share)} of their time for it ({why})"
    advice = f"see what else runs on {host}, or whether its device is slower: `paceline doctor` on all ranks"
    yield Finding("straggler", text, advice, rank, host, share)


def _waited_for(meetings: Meetings, rank: int) -> float:
    """Return the share of the others' own time in which they waited for a rank."""
    if meetings.waited_for is not None:
        return meetings.waited_for[rank]
    # An older record has only what all ranks waited, of the time of all, the late one's too.
    number = len(meetings.last)
    return meetings.waiting * number / (number - 1)


def _beyond_others(values: Sequence[float], rank: int) -> float:
    """Return how much more a rank has than the others, relative to them."""
    others = [value for number, value in enumerate(values) if number != rank]
    return values[rank] / (statistics.median(others) or math.inf) - 1 if others else 0.0


def _slow_phase(seconds: Sequence[Mapping[str, float]], rank: int) -> str:
    """Return the phase in which a rank spends most time beyond the others."""
    others = [each for number, each in enumerate(seconds) if number != rank]
    more = {
        phase: value - statistics.median(each.get(phase, 0.0) for each in others)
        for phase, value in seconds[rank].items()
        if phase != "communication"
    }
    return max(more, key=more.__getitem__)


def _padding(record: EpochRecord) -> Iterator[Finding]:
    share, way = record.padding or 0.0, _way(record)
    order = way.order
    if share < PADDING_SHARE or order == "sorted":  # nothing pads less than sorted
        return
    advice = "`--order bucket` puts samples of like length together"
    if order == "bucket":
        advice = f"`--bins {2 * (way.bins or 16)}` makes lengths of a batch more alike"
    yield Finding("padding", f"{_percent(share)} of what is computed is padding", advice, share=share)


def _recompiles(record: EpochRecord) -> Iterator[Finding]:
    compiled = record.compile
    if compiled is None or compiled.recompiles < RECOMPILES:
        return
    share = min(1.0, compiled.seconds / record.elapsed_s)
    times = f"the model was compiled again {compiled.recompiles} times in this epoch"
    text = f"{times}, and compiling took {_percent(share)} of it"
    advice = "`TORCH_LOGS=recompiles` in front of the command says why; `-O2` does not compile"
    yield Finding("recompiles", text, advice, share=share)


def _launches(record: EpochRecord) -> Iterator[Finding]:
    device, way = record.device, _way(record)
    if device is None or not device.sampled_steps:
        return
    rank, caught_up = _worst(device.caught_up or [0.0])
    if caught_up < CAUGHT_UP_SHARE:
        return
    text = f"in {_percent(caught_up)} of the steps{_on(record, rank)} the GPU waited for the host to launch kernels"
    level, highest, ways = way.level or 0, way.highest_level, []
    if highest >= 4 > level:
        ways.append("`-O4` launches a step as one graph")
    elif highest >= 3 > level:
        ways.append("`-O3` joins small kernels")
    if way.grains_per_rank > 1:
        ways.append("fewer `--grains` makes each larger")
    ways.append("a larger `--global-batch`, or no `.item()` in the loss")
    # At most what computing takes: how long its kernels alone would is not known.
    yield Finding("launches", text, "; ".join(ways), **_place(record, rank), share=max(_shares(record, "compute")))


def _precision(record: EpochRecord) -> Iterator[Finding]:
    way, name = _way(record), "" if record.device is None else record.device.name
    if name and way.level == 0 and way.precision is None and way.has_bf16:
        yield Finding("precision", f"-O0 computes in strict fp32, and {name} has bf16", "`-O2`, or `-O1` for TF32")


_RULES: tuple[Rule, ...] = (
    _data,
    _cores,
    _communication,
    _sums,
    _straggler,
    _padding,
    _recompiles,
    _launches,
    _precision,
)


# -- words -------------------------------------------------------------------------------------------------------------


def _way(record: EpochRecord) -> Way:
    return record.way or Way()


def _shares(record: EpochRecord, phase: str) -> list[float]:
    """Return by rank the share of a phase in its time."""
    return [rank.get(phase, 0.0) / (sum(rank.values()) or 1.0) for rank in record.seconds]


def _core_wait_shares(record: EpochRecord) -> list[float]:
    """Return by rank the share of its time in which it had no core; 0 where that is not known."""
    waited = record.core_wait or [None] * len(record.seconds)
    return [(wait or 0.0) / (sum(rank.values()) or 1.0) for wait, rank in zip(waited, record.seconds, strict=True)]


def _worst(shares: Sequence[float]) -> tuple[int | None, float]:
    """Return the largest share, with its rank if it stands out from the others."""
    rank = max(range(len(shares)), key=shares.__getitem__)
    others = [share for number, share in enumerate(shares) if number != rank]
    stands_out = not others or shares[rank] - statistics.median(others) >= NAMED_FROM
    return rank if stands_out else None, shares[rank]


def _on(record: EpochRecord, rank: int | None) -> str:
    hosts = record.hosts or []
    if len(record.seconds) == 1:
        return ""
    if rank is None:
        return " on all ranks"
    return f" on rank {rank}" + (f" ({hosts[rank]})" if len(set(hosts)) > 1 else "")


class _Place(TypedDict):
    rank: int | None
    host: str | None


def _place(record: EpochRecord, rank: int | None) -> _Place:
    return {"rank": rank, "host": None if rank is None or record.hosts is None else record.hosts[rank]}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
