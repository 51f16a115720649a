"""Every step once, whatever happened to the file."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.core.run_folder import read_journal, read_progress
from paceline.observe.journal import Journal, read


def fill(path: Path, first: int, last: int) -> None:
    journal = Journal(path, next_step=first)
    journal.step([{"kind": "step", "step": step, "epoch": 1, "loss": 1.5, "lr": 0.1} for step in range(first, last)])
    journal.epoch({"kind": "epoch", "step": last - 1, "epoch": 1, "steps": last - first})
    journal.end("finished")


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 0, 7)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # killed while writing
    with path.open("ab") as file:
        file.write(b"\n\xff\xfe\n")  # and the disk is not what it was
    fill(path, 4, 9)
    assert [record["step"] for record in read(path)] == list(range(9))
    assert [record["step"] for record in read(path, "epoch")] == [8], "the epoch that ended past the checkpoint is gone"


def test_a_finished_epoch_stays_when_a_run_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 0, 7)
    fill(path, 7, 9)
    assert [record["steps"] for record in read(path, "epoch")] == [7, 2]


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.step([{"kind": "step", "step": 0, "epoch": 2, "loss": float("nan"), "lr": None}])
    journal.validation({"kind": "validation", "step": 0, "dev/loss": float("inf"), "dev/wer": 0.25})
    journal.epoch({"kind": "epoch", "step": 0, "loss": float("nan"), "seconds": [{"data": float("inf")}]})
    journal.end("finished")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "step", "step": 0, "epoch": 2, "loss": None, "lr": None},
        {"kind": "validation", "step": 0, "dev/loss": None, "dev/wer": 0.25},
        {"kind": "epoch", "step": 0, "loss": None, "seconds": [{"data": None}]},
    ]


def test_a_step_line_is_what_json_itself_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = {"kind": "step", "step": 41, "epoch": 3, "loss": 0.1 + 0.2, "lr": 1e-05}
    journal = Journal(path)
    journal.step([record])
    journal.end("finished")
    assert path.read_text() == json.dumps(record) + "\n"


def old_lines() -> list[dict[str, object]]:
    """Two epochs of two steps as earlier versions counted them: from 0, a validation after an epoch with the next."""
    return [
        {"kind": "step", "step": 0, "epoch": 0, "loss": 1.0, "lr": 0.1},
        {"kind": "validation", "step": 0, "epoch": 0, "dev/loss": 1.0},
        {"kind": "step", "step": 1, "epoch": 0, "loss": 1.0, "lr": 0.1},
        {"kind": "epoch", "step": 1, "epoch": 0, "steps": 2},
        {"kind": "validation", "step": 1, "epoch": 1, "dev/loss": 1.0},
        {"kind": "step", "step": 2, "epoch": 1, "loss": 1.0, "lr": 0.1},
        {"kind": "progress", "step": 2, "epoch": 1, "epochs": 2},
    ]


def test_epochs_count_from_one_in_journals_of_before_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in old_lines()))
    counted = [1, 1, 1, 1, 1, 2, 2]
    journal = read_journal(path)
    assert [record["epoch"] for record in journal.steps] == [1, 1, 2]
    assert [record["epoch"] for record in journal.validations] == [1, 1]
    assert read_progress(path).progress["epoch"] == 2
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [0, 0, 0, 0, 1, 1, 1], "only read"
    Journal(path, next_step=3, next_validation=3).end("finished")
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == counted
    Journal(path, next_step=3, next_validation=3).end("finished")
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == counted, "once"
