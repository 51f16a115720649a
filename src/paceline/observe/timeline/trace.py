"""Timeline as Perfetto and Chrome read it (Trace Event Format): events of all ranks, each rank a process of its own.

Pure functions on values. Times inside are nanoseconds of `time.perf_counter_ns`; the format wants microseconds.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.disk import replacing

Event = dict[str, Any]

PHASE, STEP = "phase", "step"
"""Categories of our own events."""
_PHASE_TRACK, _STEP_TRACK, _FIRST_TORCH_TRACK = 1, 2, 10
_TRACKS_PER_RANK = 1000
"""Process numbers of one rank: its own, and one for each device that torch names."""
_FLOWS = ("s", "t", "f")


@dataclass
class Tape:
    """Notes of one rank while it was recorded."""

    laps: list[tuple[str, int, int]] = field(default_factory=list)
    """Phase, begin and end."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Step, begin and end."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Moment, and bytes of memory that the process had."""


def rank_events(rank: int, about: str, tape: Tape, shift_ns: int) -> list[Event]:
    """Return the named tracks of a rank. `shift_ns` brings its times to the common axis."""
    pid = rank * _TRACKS_PER_RANK
    events = [
        _name("process_name", pid, 0, name=f"rank {rank}"),
        _name("process_labels", pid, 0, labels=about),
        _name("process_sort_index", pid, 0, sort_index=pid),
    ]
    for track, title in ((_STEP_TRACK, "steps"), (_PHASE_TRACK, "phases")):
        events.append(_name("thread_name", pid, track, name=title))
        events.append(_name("thread_sort_index", pid, track, sort_index=-track))
    for step, began, ended in tape.steps:
        events.append(_span(f"step {step}", STEP, pid, _STEP_TRACK, began + shift_ns, ended + shift_ns))
    for phase, began, ended in tape.laps:
        events.append(_span(phase, PHASE, pid, _PHASE_TRACK, began + shift_ns, ended + shift_ns))
    for moment, num_bytes in tape.memory:
        events.append(_count("host memory", pid, (moment + shift_ns) / 1e3, resident_bytes=num_bytes))
    return events


def torch_events(rank: int, events: Iterable[Event], shift_us: float, own_pid: int) -> list[Event]:
    """Move the events of torch.profiler on this rank to the common axis and into the rank's number range.

    torch numbers the host's tracks by process (`own_pid`) and those of devices by device.
    """
    pid = rank * _TRACKS_PER_RANK
    processes: dict[int, int] = {own_pid: pid}
    threads: dict[tuple[int, Any], int] = {}
    moved = []
    for event in events:
        kind, process = event.get("ph"), event.get("pid")
        if not isinstance(process, int) or (kind == "M" and event["name"] != "thread_name"):
            continue  # names and order of processes are ours; "Spans" and "Traces" say nothing of the run
        new_pid = processes.setdefault(process, pid + len(processes))
        track = threads.setdefault((process, event.get("tid")), _FIRST_TORCH_TRACK + len(threads))
        if kind == "M":  # a name holds at all times
            moved.append(
                {**{name: value for name, value in event.items() if name != "ts"}, "pid": new_pid, "tid": track}
            )
            continue
        event = {**event, "pid": new_pid, "tid": track, "ts": event.get("ts", 0.0) + shift_us}
        if kind in _FLOWS:
            event["id"] = f"{rank}:{event['id']}"  # an arrow must not lead to another rank
        moved.append(_torch_memory(event) if event["name"] == "[memory]" else event)
    for process, new_pid in processes.items():
        if new_pid != pid:
            moved.append(_name("process_name", new_pid, 0, name=f"rank {rank}, device {process}"))
            moved.append(_name("process_sort_index", new_pid, 0, sort_index=new_pid))
    return moved


def _torch_memory(event: Event) -> Event:
    """Turn an allocation into a point on a curve of allocated memory."""
    args = event["args"]
    where = "cpu" if args.get("Device Type") == 0 else f"device {args.get('Device Id')}"
    return _count(f"torch memory, {where}", event["pid"], event["ts"], allocated_bytes=args.get("Total Allocated", 0))


def earliest_us(events: Iterable[Event]) -> float:
    """Return when the first of them began; infinity where none has a time."""
    return min((float(event["ts"]) for event in events if "ts" in event), default=math.inf)


def earlier(events: Iterable[Event], by_us: float) -> list[Event]:
    """Return the events, moved to an earlier time."""
    return [{**event, "ts": event["ts"] - by_us} if "ts" in event else event for event in events]


def pack(events: Sequence[Event]) -> bytes:
    """Compress a rank's events for the way to the first rank."""
    return zlib.compress(",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode(), 1)


def write(path: Path, parts: Iterable[bytes], about: dict[str, Any]) -> None:
    """Write one file of all ranks' events, which has its name only when it is complete."""
    with replacing(path, "wb") as packed, gzip.open(packed, "wb", compresslevel=6) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + json.dumps(about).encode() + b',"traceEvents":[\n')
        for number, part in enumerate(parts):
            file.write((b",\n" if number else b"") + zlib.decompress(part))
        file.write(b"\n]}\n")


def copy(path: Path, target: Path) -> None:
    """Copy a timeline to a file of another name: as plain JSON, unless that ends in .gz."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, "wb") as file, open(path, "rb") if target.suffix == ".gz" else gzip.open(path) as packed:
        shutil.copyfileobj(packed, file)


def read(path: Path) -> dict[str, Any]:
    """Read a timeline file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        timeline: dict[str, Any] = json.load(file)
    return timeline


def rank_of(event: Event) -> int:
    return int(event["pid"]) // _TRACKS_PER_RANK


def _name(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _span(name: str, category: str, pid: int, tid: int, began_ns: int, ended_ns: int) -> Event:
    times = {"ts": began_ns / 1e3, "dur": (ended_ns - began_ns) / 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def _count(name: str, pid: int, ts: float, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": values}
