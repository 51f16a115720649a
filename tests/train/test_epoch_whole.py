"""The record of an epoch is of all its steps, wherever the run was stopped, killed or given more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.journal import read
from paceline.train.checkpoint import reader as restore
from tests.train.small import NUM_SAMPLES, STEPS_PER_EPOCH, SmallTask, trainer
from tests.train.test_trainer_resume import StoppingTask


def epochs(run: Path) -> list[dict[str, Any]]:
    return read(run / "metrics.jsonl", "epoch")


def what_was_computed(run: Path) -> list[Any]:
    names = ("step", "epoch", "steps", "loss", "skipped", "padding", "samples")
    return [[record[name] for name in names] for record in epochs(run)]


@pytest.mark.parametrize("at_step", range(2 * STEPS_PER_EPOCH))
def test_stopped_at_any_step_and_resumed(tmp_path: Path, at_step: int) -> None:
    trainer(SmallTask(), tmp_path / "whole", epochs=2).fit()
    assert trainer(StoppingTask(at_step), tmp_path / "run", epochs=2).fit().status == "stopped"
    trainer(SmallTask(), tmp_path / "run", epochs=2, resume="auto").fit()
    assert what_was_computed(tmp_path / "run") == what_was_computed(tmp_path / "whole")
    for record in epochs(tmp_path / "run"):
        steps = [each for each in read(tmp_path / "run" / "metrics.jsonl") if each["epoch"] == record["epoch"]]
        assert record["loss"] == pytest.approx(sum(each["loss"] for each in steps) / STEPS_PER_EPOCH, rel=1e-15)
        assert record["samples"] == NUM_SAMPLES
        assert sum(record["seconds"][0].values()) == pytest.approx(NUM_SAMPLES / record["objects_per_s"], rel=1e-3)


def test_times_are_those_of_both_launches(tmp_path: Path) -> None:
    trainer(StoppingTask(1), tmp_path / "run", epochs=1).fit()
    found = restore.newest(tmp_path / "run" / "checkpoints").checkpoint
    assert found is not None
    (before,) = found.state["so_far"]["ranks"]
    trainer(SmallTask(), tmp_path / "run", epochs=1, resume="auto").fit()
    (record,) = epochs(tmp_path / "run")
    assert record["launch"]["steps"] == 1
    together = sum(before["seconds"].values()) + record["launch"]["seconds"]
    assert sum(record["seconds"][0].values()) == pytest.approx(together, abs=1e-4)
    assert record["between"][0]["setup"] > before["between"]["setup"] > 0


def test_an_epoch_whose_end_was_saved_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed after the epoch's record, before the next checkpoint: the newest one is from its last step."""
    first = trainer(SmallTask(), tmp_path / "run", epochs=2, save_every_steps=3, keep_best=0)
    save = first.checkpoints.save
    first.checkpoints.save = lambda *args: save(*args) if first.engine.num_steps <= 3 else None  # type: ignore[method-assign]
    first.fit()
    (written, _) = epochs(tmp_path / "run")
    capsys.readouterr()
    trainer(SmallTask(), tmp_path / "run", epochs=2, save_every_steps=3, keep_best=0, resume="auto").fit()
    assert [record["step"] for record in epochs(tmp_path / "run")] == [2, 5]
    assert epochs(tmp_path / "run")[0] == written
    assert "train epoch 1" not in capsys.readouterr().out


def test_a_run_that_is_given_more_has_one_record_of_the_epoch(tmp_path: Path) -> None:
    trainer(SmallTask(), tmp_path / "whole", epochs=2).fit()
    trainer(SmallTask(), tmp_path / "run", steps=4).fit()
    assert [record["steps"] for record in epochs(tmp_path / "run")] == [3, 1]
    trainer(SmallTask(), tmp_path / "run", steps=4, resume="auto").fit()
    assert [record["steps"] for record in epochs(tmp_path / "run")] == [3, 1], "nothing was left to do"
    trainer(SmallTask(), tmp_path / "run", epochs=2, resume="auto", allow_change=True).fit()
    assert what_was_computed(tmp_path / "run") == what_was_computed(tmp_path / "whole")


def test_a_checkpoint_that_is_older_than_these_sums_still_loads(tmp_path: Path) -> None:
    first = trainer(StoppingTask(1), tmp_path / "run", epochs=1)
    save = first.checkpoints.save
    first.checkpoints.save = lambda *args: save(*args[:-1], lambda: None)  # type: ignore[method-assign]
    first.fit()
    (file,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    assert json.loads(file.read_text())["state"]["so_far"] is None
    trainer(SmallTask(), tmp_path / "run", epochs=1, resume="auto").fit()
    (record,) = epochs(tmp_path / "run")
    assert (record["steps"], record["samples"]) == (1, 4), "of what is known"
