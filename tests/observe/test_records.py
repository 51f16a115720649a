"""Lines of `metrics.jsonl` as records and back: keys, their order, and files of other versions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from paceline.observe.records import (
    Compilation,
    DeviceSteps,
    EpochRecord,
    Finding,
    Launch,
    Meetings,
    Memory,
    StepRecord,
    ValidationRecord,
    Way,
)

# A line of a run of commit ce01e4b, with every key that there was.
LINE: dict[str, Any] = {
    "kind": "epoch",
    "step": 9,
    "epoch": 1,
    "stage": "task2",
    "steps": 5,
    "loss": 0.5,
    "skipped": 0,
    "padding": None,
    "compiled": 3,
    "graphs": {"replayed": 4},
    "samples": 40,
    "objects_per_s": 20.0,
    "core_wait": [0.25, None],
    "work": [20.0, 20.0],
    "computing": 0.75,
    "seconds": [{"data": 0.5, "compute": 1.5}, {"data": 0.5, "compute": 1.5}],
    "between": [{"setup": 1.0}, {"setup": 1.0}],
    "rates": {"samples_per_s": 20.0},
    "memory": [{"host_bytes": 7, "device_bytes": None}, {"host_bytes": 8, "device_bytes": None}],
    "flops_per_s": 1e12,
    "mfu": 0.25,
    "meetings": {"exchange": 0.1, "waiting": 0.2, "last": [0.5, 0.5], "waited_for": [0.1, 0.1]},
    "device": {"name": "NVIDIA H200", "sampled_steps": 2, "ms": [{"compute": 1.0}], "caught_up": [0.5]},
    "compile": {"recompiles": 1, "seconds": 2.5},
    "hosts": ["a", "b"],
    "way": Way(level=2, workers=3).to_json(),
    "launch": {"steps": 2, "seconds": 0.5},
    "findings": [{"kind": "data", "text": "t", "advice": "a", "rank": None, "host": None, "share": 0.25}],
}


def test_a_line_becomes_a_record_and_the_same_line_again() -> None:
    record = EpochRecord.from_json(json.loads(json.dumps(LINE)))
    assert record.memory == [Memory(7, None), Memory(8, None)]
    assert record.meetings == Meetings(0.1, 0.2, [0.5, 0.5], [0.1, 0.1])
    assert record.device == DeviceSteps("NVIDIA H200", 2, [{"compute": 1.0}], [0.5])
    assert record.compile == Compilation(1, 2.5)
    assert record.launch == Launch(2, 0.5)
    assert record.findings == [Finding("data", "t", "a", share=0.25)]
    assert json.dumps(record.to_json()) == json.dumps(LINE), "the order of keys, too"


def test_an_older_line_has_defaults_and_unknown_keys_stay() -> None:
    record = EpochRecord.from_json({"kind": "epoch", "step": 3, "epoch": 0, "way": {"workers": 2}, "novel": 1.5})
    assert (record.findings, record.way, record.elapsed_s) == (None, Way(workers=2), 0.0)
    assert record.more == {"novel": 1.5}
    line = record.to_json()
    assert line["novel"] == 1.5
    assert "stage" not in line
    assert "mfu" not in line
    assert line["padding"] is None


def test_steps_and_validations() -> None:
    step = {"kind": "step", "step": 4, "epoch": 1, "loss": 0.5, "lr": 0.1, "spread": 2.0}
    assert StepRecord.from_json(step) == StepRecord(4, 1, 0.5, 0.1, {"spread": 2.0})
    assert json.dumps(StepRecord.from_json(step).to_json()) == json.dumps(step)
    shown = {"dev": [{"reference": "a", "hypothesis": "b"}]}
    validation = {"kind": "validation", "step": 4, "epoch": 1, "seconds": 0.5, "dev/loss": 1.0, "samples": shown}
    record = ValidationRecord.from_json(validation)
    assert record == ValidationRecord(4, 1, 0.5, {"dev/loss": 1.0}, shown)
    assert json.dumps(record.to_json()) == json.dumps(validation)
    assert "samples" not in replace(record, samples=None).to_json()


def test_numbers_of_an_epoch_are_the_declared_the_unknown_the_rates_and_peaks_of_memory() -> None:
    record = EpochRecord.from_json({**LINE, "novel": 1.5, "words": "none"})
    assert dict(record.numbers()) == {
        "compiled": 3,
        "objects_per_s": 20.0,
        "computing": 0.75,
        "flops_per_s": 1e12,
        "mfu": 0.25,
        "novel": 1.5,
        "samples_per_s": 20.0,
        "host_bytes": 8,
    }


def test_a_resumed_epoch_has_machine_numbers_of_the_last_launch() -> None:
    launch = EpochRecord(step=9, samples=4, mfu=0.5, seconds=[{"compute": 1.0}], more={"dropped": 1})
    whole = EpochRecord(samples=6, seconds=[{"compute": 3.0}], more={"dropped": 2})
    both = launch.with_whole(whole)
    assert (both.step, both.samples, both.mfu, both.elapsed_s, both.more) == (9, 6, 0.5, 3.0, {"dropped": 2})
