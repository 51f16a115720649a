"""From what each rank has measured of an epoch to the numbers of its record. Pure; `verdict.py` lists the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.observe.callback import Record
from paceline.observe.clock import computing_share
from paceline.observe.device_clock import DeviceTime, apportion
from paceline.observe.rank_waits import meetings
from paceline.observe.throughput import rates


@dataclass(frozen=True)
class RankEpoch:
    """What one rank has measured of an epoch."""

    seconds: dict[str, float]
    """By phase, as its host saw them."""
    between: dict[str, float]
    """The same since the record of the epoch before."""
    num_samples: int
    count: float = 0.0
    """What its losses were divided by."""
    length: float | None = None
    """Of its samples together, without padding; None where lengths are not known."""
    work: float = 0.0
    """What it computed: its lengths with their padding, or its samples."""
    core_wait_s: float | None = None
    """In which it could have gone on, but had no core; None where the system does not say."""
    host_bytes: int = 0
    device_bytes: int | None = None
    waits: list[float] = field(default_factory=list)
    """Seconds at its meetings with the other ranks."""
    device: DeviceTime | None = None
    recompiles: int | None = None
    """None where nothing is compiled."""
    compile_s: float = 0.0


@dataclass(frozen=True)
class Units:
    """What a task's numbers are called, and what training on them costs."""

    samples: str = "samples"
    lengths: str = ""
    counts: str = ""
    flops: float | None = None
    """Of training on one unit of length, or on one sample where lengths are not known."""


def epoch_numbers(
    ranks: Sequence[RankEpoch], units: Units, *, device: str | None = None, peak_flops: float | None = None
) -> Record:
    """`device` is the name of the GPU, `peak_flops` what one of them could do in a second."""
    seconds = [rank.seconds if rank.device is None else apportion(rank.seconds, rank.device) for rank in ranks]
    longest = max(sum(rank.values()) for rank in seconds)
    num_samples = sum(rank.num_samples for rank in ranks)
    lengths = [rank.length for rank in ranks if rank.length is not None]
    length = sum(lengths) if lengths else None
    found: Record = {
        "samples": num_samples,
        "objects_per_s": num_samples / longest,
        "core_wait": [rank.core_wait_s for rank in ranks],
        "work": [rank.work for rank in ranks],
        "computing": computing_share(*seconds),
        "seconds": [_rounded(rank) for rank in seconds],
        "between": [_rounded(rank.between) for rank in ranks],
        "rates": rates(
            longest,
            samples=num_samples,
            sample_unit=units.samples,
            length=length,
            length_unit=units.lengths,
            count=sum(rank.count for rank in ranks),
            count_unit=units.counts,
        ),
        "memory": [{"host_bytes": rank.host_bytes, "device_bytes": rank.device_bytes} for rank in ranks],
    }
    if units.flops is not None:
        found["flops_per_s"] = units.flops * (num_samples if length is None else length) / longest
        if peak_flops is not None:
            found["mfu"] = found["flops_per_s"] / (peak_flops * len(ranks))
    met = meetings([rank.waits for rank in ranks])
    if met is not None:
        each = [sum(rank.values()) for rank in seconds]
        total, met_s = sum(each), sum(rank["communication"] for rank in seconds)
        found["meetings"] = {
            "exchange": met_s / total * met.exchange,
            "waiting": met_s / total * (1 - met.exchange),
            "last": list(met.last),
            "waited_for": [met_s * share / (total - own) for share, own in zip(met.waited_for, each, strict=True)],
        }
    if device is not None:
        found["device"] = {"name": device, **_device([rank.device for rank in ranks if rank.device is not None])}
    if ranks[0].recompiles is not None:
        slowest = max(ranks, key=lambda rank: rank.recompiles or 0)
        found["compile"] = {"recompiles": slowest.recompiles, "seconds": round(slowest.compile_s, 6)}
    return found


def _device(times: Sequence[DeviceTime]) -> Record:
    return {
        "sampled_steps": min((time.num_steps for time in times), default=0),
        "ms": [
            {phase: round(1e3 * value / max(1, time.num_steps), 6) for phase, value in time.seconds.items()}
            for time in times
        ],
        "caught_up": [time.num_caught_up / max(1, time.num_steps) for time in times],
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {phase: round(value, 6) for phase, value in seconds.items()}
