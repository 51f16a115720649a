"""What held an epoch back, and what to type next: a pure function of the epoch's record in `metrics.jsonl`.

Keys of a record of kind `epoch`, beside step, epoch, (stage,) steps, loss and skipped:

    seconds          by rank: seconds by phase (`clock.PHASES`); on a GPU the phases of a step are as its events say
    between          by rank: the same of the time since the last epoch's record: its validation and checkpoint, mostly
    hosts            by rank: the machine
    computing        share of all ranks' time in which they did not wait for data
    samples, objects_per_s, padding (None where lengths are not known)
    work             by rank: what it computed, in lengths with their padding, or in samples
    rates            speeds by name, over all ranks: `utterances_per_s`, `audio_hours_per_hour`, `tokens_per_s`, ...
    flops_per_s      over all ranks, where the task knows its FLOPs; mfu: of the devices' peak, where that is known
    memory           by rank: host_bytes (of the process), device_bytes (None on a CPU), the most so far
    core_wait        by rank: seconds in which it could have gone on, but had no core (None where that is not known)
    meetings         of several ranks: exchange and waiting (shares of all ranks' time: moving numbers, and waiting for
                     one that is late), last (by rank: share of the meetings to which it came last), waited_for (by
                     rank: share of the others' time in which they waited for it)
    device           of GPUs: name, sampled_steps, ms (by rank: ms of a step by phase), caught_up (by rank: share of the
                     steps whose work was done before the host had launched it all)
    compile          where the model is compiled: recompiles, seconds
    way              the settings and facts that findings depend on
    launch           where the run was resumed within this epoch: steps and seconds since. Meetings, device, compile,
                     memory, FLOPs, way and findings are of these; all else is of the whole epoch, without steps that
                     were lost and done again
    findings         by weight: kind, text, advice, rank, host, share

A record of kind `validation` has `seconds`, its own time on the first rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal[
    "data", "cores", "communication", "padding", "balance", "straggler", "recompiles", "launches", "precision"
]
Matter = tuple[Kind, int | None]
"""What a finding is about: its kind, and the rank where one is named."""

LEAST_SECONDS, LEAST_STEPS = 1.0, 10
"""Less than this says nothing about a run."""
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
SLOW_BF16_DEPTHWISE = ("H200",)
"""Where the library's bf16 depthwise convolution was measured to be slower than fp16 (2.4 times, QuartzNet)."""


@dataclass(frozen=True)
class Finding:
    """One thing that held the run back."""

    kind: Kind
    text: str
    """What was seen, with its number."""
    advice: str
    """What to type."""
    rank: int | None = None
    host: str | None = None
    share: float = 0.0
    """What the epoch would have been shorter by (of the work, for padding), as far as is known: findings come in this
    order. A late rank costs what the others wait; uneven work less, as they would have more of it."""

    @property
    def matter(self) -> Matter:
        return self.kind, self.rank

    @property
    def line(self) -> str:
        return f"{self.text}: {self.advice}"

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def verdict(record: Mapping[str, Any]) -> list[Finding]:
    """What held the epoch of this record back, the costliest first; nothing, if nothing did or too little was seen."""
    if not is_judged(record):
        return []
    found = [
        *_data(record),
        *_cores(record),
        *_communication(record),
        *_straggler(record),
        *_padding(record),
        *_recompiles(record),
        *_launches(record),
        *_precision(record),
    ]
    return sorted(found, key=lambda finding: -finding.share)


def is_judged(record: Mapping[str, Any]) -> bool:
    """Whether enough was seen of this epoch to say what held it back."""
    launch = record.get("launch")
    if launch:  # the run was resumed within this epoch, and findings are of what it has done since
        return bool(launch["steps"] >= LEAST_STEPS and launch["seconds"] >= LEAST_SECONDS)
    seconds = record.get("seconds") or [{}]
    return bool(record.get("steps", 0) >= LEAST_STEPS and max(sum(rank.values()) for rank in seconds) >= LEAST_SECONDS)


def news(told: Mapping[Matter, float], found: Sequence[Finding], change: float = 0.1) -> list[Finding]:
    """Of these findings, those worth saying: not told yet, or by now another matter in size."""
    return [
        finding
        for finding in found
        if finding.matter not in told or abs(finding.share - told[finding.matter]) >= change
    ]


# -- one function for each thing that can hold a run back --------------------------------------------------------------


def _data(record: Mapping[str, Any]) -> Iterator[Finding]:
    rank, share = _worst(_shares(record, "data"))
    if share < DATA_SHARE:
        return
    way = record.get("way", {})
    workers = enough_workers(share, int(way.get("workers") or 0))
    most = max(1, int(way.get("cores", 1)) // int(way.get("local_size", 1)))
    more_workers = f"`--workers {min(workers, most)}`"
    is_packed = bool(way.get("is_packed"))
    if way.get("is_stream"):
        advice = "an iterable is read by the training process itself: give a data set with `__getitem__` and `__len__`"
    elif int(way.get("workers") or 0) < min(workers, most):
        advice = more_workers if is_packed else f"{more_workers}, or `paceline pack`"
    elif is_packed:
        advice = "it is packed already: less to do for each sample, a faster disk, or more cores for `--workers`"
    else:
        advice = "`paceline pack`"
    yield Finding(
        "data", f"data wait {_percent(share)}{_on(record, rank)}", advice, **_place(record, rank), share=share
    )


def enough_workers(share: float, workers: int) -> int:
    """Workers that would read as fast as the rest of a step goes, where so many leave `share` of the time waiting."""
    rest = max(1.0 - share, 1e-3)
    # Without workers reading takes `share` of the time; with some, they read all the time and are still too slow.
    needed = share / rest if workers == 0 else workers / rest
    return max(1, math.ceil(needed - 1e-9))


def _cores(record: Mapping[str, Any]) -> Iterator[Finding]:
    """Others on the machine take the time that the clock shows as computing, or as waiting for a rank."""
    rank, share = _worst(_core_wait_shares(record))
    if share < CORE_WAIT_SHARE:
        return
    way, place = record.get("way", {}), _place(record, rank)
    text = f"no core was free for {_percent(share)} of the time{_on(record, rank)}"
    own = int(way.get("local_size", 1)) * (1 + int(way.get("workers") or 0))
    cores = int(way.get("cores", 1))
    advice = f"more runs on {place['host'] or 'each machine'} than its {cores} cores: see `top`"
    if own > cores:
        advice = f"{own} processes of this run share {cores} cores: fewer `--workers`, or fewer `--procs`"
    yield Finding("cores", text, advice, **place, share=share)


def _communication(record: Mapping[str, Any]) -> Iterator[Finding]:
    # Without a core nothing moves either: what may have been that is no fault of the link.
    share = record.get("meetings", {}).get("exchange", 0.0) - max(_core_wait_shares(record))
    if share < EXCHANGE_SHARE:
        return
    way = record.get("way", {})
    what = "sums of gradients" if way.get("reduce") == "grad" else "averages of weights"
    yield Finding("communication", f"{what} take {_percent(share)} of the time", _lighter(way), share=share)


def _lighter(way: Mapping[str, Any]) -> str:
    """How ranks would have less to say to each other."""
    if way.get("shard") == "full":
        return "`--shard none`, if the model fits, sends less; or a larger `--global-batch` with more `--grains`"
    if way.get("reduce") == "grad":
        seldom = "`--reduce param --sync-step 100` meets once in 100 steps"
        return f"`--wire bf16` sends half of it; {seldom}" if way.get("wire") == "full" else seldom
    if not way.get("sync_overlap"):
        return "`--sync-overlap 10` goes on stepping meanwhile" + ("" if way["wire"] == "int8" else "; `--wire int8`")
    if way.get("wire") != "int8":
        return "`--wire int8` sends a quarter of it"
    return f"`--sync-step {2 * way['sync_step']}`" if way.get("sync_step") else "a larger `--sync-seconds`"


def _straggler(record: Mapping[str, Any]) -> Iterator[Finding]:
    """The rank that others wait for is the one that waits least: it comes last to nearly every meeting."""
    meetings = record.get("meetings", {})
    last = meetings.get("last", [])
    if len(last) < 2 or max(last) < LAST_SHARE:
        return
    rank = max(range(len(last)), key=last.__getitem__)
    share = _waited_for(meetings, rank)
    if share < WAITING_SHARE:
        return
    phase = _slow_phase(record["seconds"], rank)
    if phase == "data" and _shares(record, "data")[rank] >= DATA_SHARE:
        return  # that it waits for data has been said, with what to do about it
    host = record["hosts"][rank]
    more = _beyond_others(record.get("work", []), rank)
    slower = _beyond_others([each.get("compute", 0.0) for each in record["seconds"]], rank)
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


def _waited_for(meetings: Mapping[str, Any], rank: int) -> float:
    """The share of the others' own time in which they waited for a rank."""
    if "waited_for" in meetings:
        return float(meetings["waited_for"][rank])
    # An older record has only what all ranks waited, of the time of all, the late one's too.
    number = len(meetings["last"])
    return float(meetings.get("waiting", 0.0)) * number / (number - 1)


def _beyond_others(values: Sequence[float], rank: int) -> float:
    """How much more a rank has than the others, relative to them."""
    others = [value for number, value in enumerate(values) if number != rank]
    return values[rank] / (statistics.median(others) or math.inf) - 1 if others else 0.0


def _slow_phase(seconds: Sequence[Mapping[str, float]], rank: int) -> str:
    """Where a rank spends more time than the others do."""
    others = [each for number, each in enumerate(seconds) if number != rank]
    more = {
        phase: own - statistics.median(each.get(phase, 0.0) for each in others)
        for phase, own in seconds[rank].items()
        if phase != "communication"
    }
    return max(more, key=more.__getitem__)


def _padding(record: Mapping[str, Any]) -> Iterator[Finding]:
    share, way = record.get("padding") or 0.0, record.get("way", {})
    order = way.get("order")
    if share < PADDING_SHARE or order == "sorted":  # nothing pads less than sorted
        return
    advice = "`--order bucket` puts samples of like length together"
    if order == "bucket":
        advice = f"`--bins {2 * int(way.get('bins') or 16)}` makes lengths of a batch more alike"
    yield Finding("padding", f"{_percent(share)} of what is computed is padding", advice, share=share)


def _recompiles(record: Mapping[str, Any]) -> Iterator[Finding]:
    number = record.get("compile", {}).get("recompiles", 0)
    if number < RECOMPILES:
        return
    share = min(1.0, record["compile"]["seconds"] / max(sum(rank.values()) for rank in record["seconds"]))
    text = f"the model was compiled again {number} times in this epoch, and compiling took {_percent(share)} of it"
    advice = "`TORCH_LOGS=recompiles` in front of the command says why; `-O2` does not compile"
    yield Finding("recompiles", text, advice, share=share)


def _launches(record: Mapping[str, Any]) -> Iterator[Finding]:
    device, way = record.get("device", {}), record.get("way", {})
    rank, caught_up = _worst(device.get("caught_up") or [0.0])
    if not device.get("sampled_steps") or caught_up < CAUGHT_UP_SHARE:
        return
    text = f"in {_percent(caught_up)} of the steps{_on(record, rank)} the GPU waited for the host to launch kernels"
    level, highest, ways = int(way.get("level", 0)), _highest_level(way), []
    if highest >= 4 > level:
        ways.append("`-O4` launches a step as one graph")
    elif highest >= 3 > level:
        ways.append("`-O3` joins small kernels")
    if int(way.get("grains_per_rank", 1)) > 1:
        ways.append("fewer `--grains` makes each larger")
    ways.append("a larger `--global-batch`, or no `.item()` in the loss")
    # At most what computing takes: how long its kernels alone would is not known.
    yield Finding("launches", text, "; ".join(ways), **_place(record, rank), share=max(_shares(record, "compute")))


def _precision(record: Mapping[str, Any]) -> Iterator[Finding]:
    way = record.get("way", {})
    name = record.get("device", {}).get("name", "")
    if not name:
        return
    if way.get("level") == 0 and way.get("precision") is None and way.get("has_bf16"):
        yield Finding("precision", f"-O0 computes in strict fp32, and {name} has bf16", "`-O2`, or `-O1` for TF32")
    is_bf16 = way.get("precision") is None and way.get("level") in (2, 3)
    if is_bf16 and way.get("depthwise") and any(known in name for known in SLOW_BF16_DEPTHWISE):
        best = "`-O4` has its own kernels for them, and " if _highest_level(way) >= 4 else ""
        text = f"depthwise convolutions in bf16 are slow on {name}"
        yield Finding("precision", text, f"{best}`--precision fp16` was 2.4 times as fast for QuartzNet")


def _highest_level(way: Mapping[str, Any]) -> int:
    """That may be advised: not every task or setting goes with each level. 3 where an older record does not say."""
    return int(way.get("highest_level", 3))


# -- words -------------------------------------------------------------------------------------------------------------


def _shares(record: Mapping[str, Any], phase: str) -> list[float]:
    """By rank, the share of its time."""
    return [rank.get(phase, 0.0) / (sum(rank.values()) or 1.0) for rank in record["seconds"]]


def _core_wait_shares(record: Mapping[str, Any]) -> list[float]:
    """By rank, the share of its time in which it had no core; 0 where that is not known."""
    waited = record.get("core_wait") or [None] * len(record["seconds"])
    return [(wait or 0.0) / (sum(rank.values()) or 1.0) for wait, rank in zip(waited, record["seconds"], strict=True)]


def _worst(shares: Sequence[float]) -> tuple[int | None, float]:
    """The largest share, and whose it is, if it stands out from the others."""
    rank = max(range(len(shares)), key=shares.__getitem__)
    others = [share for number, share in enumerate(shares) if number != rank]
    stands_out = not others or shares[rank] - statistics.median(others) >= NAMED_FROM
    return rank if stands_out else None, shares[rank]


def _on(record: Mapping[str, Any], rank: int | None) -> str:
    hosts = record.get("hosts", [])
    if len(record["seconds"]) == 1:
        return ""
    if rank is None:
        return " on all ranks"
    return f" on rank {rank}" + (f" ({hosts[rank]})" if len(set(hosts)) > 1 else "")


def _place(record: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
    return {"rank": rank, "host": None if rank is None or "hosts" not in record else record["hosts"][rank]}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
