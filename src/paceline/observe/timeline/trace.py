"""Timeline file in the Trace Event Format of Chrome and Perfetto: events of all ranks, each rank a process.

Pure functions. Times of events are microseconds; `time.perf_counter_ns` is the clock until ranks are joined.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from paceline.core.disk import replacing

Event = dict[str, Any]

PHASE, STEP = "phase", "step"
"""Categories of our own events."""
_TRACKS = {STEP: 2**30, PHASE: 2**30 + 1}
"""Thread numbers of our own tracks, above those of any system thread."""
_PIDS_PER_RANK = 1000
"""Process numbers of one rank: the first for its host, the next ones for its devices."""


def span(name: str, category: str, rank: int, began_ns: int, ended_ns: int) -> Event:
    """Return an event on one of our own tracks."""
    times = {"ts": began_ns / 1e3, "dur": (ended_ns - began_ns) / 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": rank * _PIDS_PER_RANK, "tid": _TRACKS[category], **times}


def counter(name: str, rank: int, moment_us: float, num_bytes: int) -> Event:
    """Return a point on a curve of memory."""
    pid = rank * _PIDS_PER_RANK
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": moment_us, "args": {"bytes": num_bytes}}


def names(rank: int, about: str) -> list[Event]:
    """Return the titles of a rank's process and of our tracks in it."""
    pid = rank * _PIDS_PER_RANK
    events = [
        _label("process_name", pid, 0, name=f"rank {rank}"),
        _label("process_labels", pid, 0, labels=about),
        _label("process_sort_index", pid, 0, sort_index=pid),
    ]
    for category, track in _TRACKS.items():
        events.append(_label("thread_name", pid, track, name=f"{category}s"))
        events.append(_label("thread_sort_index", pid, track, sort_index=-track))
    return events


def torch_events(rank: int, events: Iterable[Event], shift_us: float, own_pid: int) -> list[Event]:
    """Return the events of torch.profiler with shifted times and the process numbers of a rank.

    torch numbers the tracks of the host by process (`own_pid`) and those of devices by their index.
    """
    pid = rank * _PIDS_PER_RANK
    processes, moved = {own_pid: pid}, []
    for event in events:
        kind, process = event["ph"], event.get("pid")
        if not isinstance(process, int) or (kind == "M" and event["name"] != "thread_name"):
            continue  # titles and order of processes are ours; "Spans" and "Traces" repeat the window
        event = {**event, "pid": processes.setdefault(process, pid + len(processes))}
        if kind == "M":
            event.pop("ts", None)  # a title has no time
        else:
            event["ts"] += shift_us
        if kind in ("s", "t", "f"):
            event["id"] = f"{rank}:{event['id']}"  # an arrow must not lead to another rank
        if event["name"] == "[memory]":
            args = event["args"]
            where = "cpu" if args.get("Device Type") == 0 else f"device {args.get('Device Id')}"
            event = counter(f"torch memory, {where}", rank, event["ts"], args.get("Total Allocated", 0))
        moved.append(event)
    del processes[own_pid]
    return moved + [_label("process_name", new, 0, name=f"rank {rank}, device {old}") for old, new in processes.items()]


def moments(events: Iterable[Event]) -> list[float]:
    """Return the times of all events that have one."""
    return [event["ts"] for event in events if "ts" in event]


def pack(events: Iterable[Event], shift_us: float) -> bytes:
    """Compress the events of a rank, with shifted times, for transport to the first rank."""
    shifted = ({**event, "ts": event["ts"] + shift_us} if "ts" in event else event for event in events)
    return zlib.compress(",\n".join(json.dumps(event, separators=(",", ":")) for event in shifted).encode(), 1)


def write(path: Path, parts: Iterable[bytes], about: dict[str, Any]) -> None:
    """Write the packed events of all ranks to one file, which is plain JSON unless its name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, "wb") as raw, gzip.open(raw, "wb", 6) if path.suffix == ".gz" else nullcontext(raw) as file:
        separator = b'{"displayTimeUnit":"ms","otherData":' + json.dumps(about).encode() + b',"traceEvents":[\n'
        for part in parts:
            file.write(separator + zlib.decompress(part))
            separator = b",\n"
        file.write(b"\n]}\n")


def read(path: Path) -> dict[str, Any]:
    """Read a timeline file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        timeline: dict[str, Any] = json.load(file)
    return timeline


def rank_of(event: Event) -> int:
    return int(event["pid"]) // _PIDS_PER_RANK


def _label(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
