"""Events of several ranks in one timeline."""

from __future__ import annotations

from paceline.observe.timeline.recorder import (
    trace,
)


def test_events_of_ranks_do_not_mix() -> None:
    seen = [
        {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": 5.0, "dur": 1.0},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 4242, "tid": 4242, "ts": 4.0, "dur": 1.0},
        {"ph": "s", "name": "ac2g", "cat": "ac2g", "pid": 4242, "tid": 4242, "ts": 4.0, "id": 9},
        {"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "name": "span", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 9.0},
    ]
    both = [trace.torch_events(rank, seen, shift_us=100.0, own_pid=4242) for rank in (0, 3)]
    for rank, events in zip((0, 3), both, strict=True):
        assert {trace.rank_of(event) for event in events} == {rank}
        spans = {event["name"]: event for event in events if event["ph"] == "X"}
        assert spans.keys() == {"gemm", "aten::mm"}
        assert (spans["gemm"]["ts"], spans["aten::mm"]["ts"]) == (105.0, 104.0)
        assert spans["gemm"]["pid"] != spans["aten::mm"]["pid"], "a device is a track of its own"
    assert {event["id"] for events in both for event in events if event["ph"] == "s"} == {"0:9", "3:9"}
