"""The record of an epoch is of all its steps, wherever the run was stopped, killed or given more."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.journal import read
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint.contents import RunState
from paceline.train.loop import train
from paceline.train.loss import TooManySkipped
from paceline.train.run import Run
from paceline.world.link import Link
from tests.crash import KILLED, run_until_death
from tests.train.small import (
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    ScoredTask,
    SmallTask,
    assert_same,
    opened,
    points,
    validations_of,
    weights,
)
from tests.train.test_divergence import NeverFinite, Overflowing
from tests.train.test_run_resume import StoppingTask


def epochs(run: Path) -> list[dict[str, Any]]:
    return read(run / "metrics.jsonl", "epoch")


def what_was_computed(run: Path) -> list[Any]:
    names = ("step", "epoch", "steps", "loss", "skipped", "padding", "samples")
    return [[record[name] for name in names] for record in epochs(run)]


@pytest.mark.parametrize("at_step", range(2 * STEPS_PER_EPOCH))
def test_stopped_at_any_step_and_resumed(tmp_path: Path, at_step: int) -> None:
    train(opened(SmallTask(), tmp_path / "whole", epochs=2))
    assert train(opened(StoppingTask(at_step), tmp_path / "run", epochs=2)).status == "stopped"
    train(opened(SmallTask(), tmp_path / "run", epochs=2, resume="auto"))
    assert what_was_computed(tmp_path / "run") == what_was_computed(tmp_path / "whole")
    for record in epochs(tmp_path / "run"):
        steps = [each for each in read(tmp_path / "run" / "metrics.jsonl") if each["epoch"] == record["epoch"]]
        assert record["loss"] == pytest.approx(sum(each["loss"] for each in steps) / STEPS_PER_EPOCH, rel=1e-15)
        assert record["samples"] == NUM_SAMPLES
        assert sum(record["seconds"][0].values()) == pytest.approx(NUM_SAMPLES / record["objects_per_s"], rel=1e-3)


def test_times_are_those_of_both_launches(tmp_path: Path) -> None:
    train(opened(StoppingTask(1), tmp_path / "run", epochs=1))
    found = restore.newest(tmp_path / "run" / "checkpoints").checkpoint
    assert found is not None
    (before,) = found.state["so_far"]["ranks"]
    train(opened(SmallTask(), tmp_path / "run", epochs=1, resume="auto"))
    (record,) = epochs(tmp_path / "run")
    assert record["launch"]["steps"] == 1
    together = sum(before["seconds"].values()) + record["launch"]["seconds"]
    assert sum(record["seconds"][0].values()) == pytest.approx(together, abs=1e-4)
    assert record["between"][0]["setup"] > before["between"]["setup"] > 0


def test_an_epoch_whose_end_was_saved_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed after the epoch's record, before the next checkpoint: the newest one is from its last step."""
    first = opened(SmallTask(), tmp_path / "run", epochs=2, save_every_steps=3, keep_best=0)
    save = first.checkpoints.save
    first.checkpoints.save = (  # type: ignore[method-assign]
        lambda run, score: save(run, score) if first.stepper.num_steps <= 3 else None
    )
    train(first)
    (written, _) = epochs(tmp_path / "run")
    capsys.readouterr()
    train(opened(SmallTask(), tmp_path / "run", epochs=2, save_every_steps=3, keep_best=0, resume="auto"))
    assert [record["step"] for record in epochs(tmp_path / "run")] == [2, 5]
    assert epochs(tmp_path / "run")[0] == written
    assert "train epoch 1" not in capsys.readouterr().out


def test_a_run_that_is_given_more_has_one_record_of_the_epoch(tmp_path: Path) -> None:
    train(opened(SmallTask(), tmp_path / "whole", epochs=2))
    train(opened(SmallTask(), tmp_path / "run", steps=4))
    assert [record["steps"] for record in epochs(tmp_path / "run")] == [3, 1]
    train(opened(SmallTask(), tmp_path / "run", steps=4, resume="auto"))
    assert [record["steps"] for record in epochs(tmp_path / "run")] == [3, 1], "nothing was left to do"
    train(opened(SmallTask(), tmp_path / "run", epochs=2, resume="auto", allow_change=True))
    assert what_was_computed(tmp_path / "run") == what_was_computed(tmp_path / "whole")


def test_a_checkpoint_that_is_older_than_these_sums_still_loads(tmp_path: Path) -> None:
    first = opened(StoppingTask(1), tmp_path / "run", epochs=1)
    save = first.checkpoints.save
    first.checkpoints.save = lambda run, score: save(replace(run, so_far=lambda: None), score)  # type: ignore[method-assign]
    train(first)
    (file,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    assert json.loads(file.read_text())["state"]["so_far"] is None
    train(opened(SmallTask(), tmp_path / "run", epochs=1, resume="auto"))
    (record,) = epochs(tmp_path / "run")
    assert (record["steps"], record["samples"]) == (1, 4), "of what is known"


class Killed(BaseException):
    """Stands for SIGKILL, right after a checkpoint is on disk."""


def killed_after_saving(first: Run, num_steps: int) -> None:
    """Train until the first checkpoint that has so many steps is on disk, and no further."""
    save = first.checkpoints.save

    def save_and_die(run: RunState, score: float | None) -> None:
        save(run, score)
        if first.stepper.num_steps == num_steps:
            raise Killed

    first.checkpoints.save = save_and_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        train(first)


class Streaming(SmallTask):
    def train_data(self) -> Any:
        return Samples()


class Samples:
    """Data of unknown length."""

    def __iter__(self) -> Any:
        return iter(points(NUM_SAMPLES, seed=1))


SCORES = [2.0, 1.0, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("make", "num_steps", "settings"),
    [
        (SmallTask, 4, {"steps": 4}),
        (SmallTask, 3, {"steps": 3}),  # the epoch ends with the last step
        (SmallTask, 6, {"steps": 6, "val_every_epochs": 2}),
        (Streaming, 4, {"steps": 4}),
        (Streaming, 3, {"steps": 3}),
        # Out of patience with a step that is saved, too: in mid-epoch, at the end of one, at the last step of one.
        (lambda: ScoredTask(SCORES), 4, {"epochs": 9, "patience": 2, "val_every_steps": 1, "monitor": "dev/score"}),
        (lambda: ScoredTask(SCORES), 12, {"epochs": 9, "patience": 2, "val_every_epochs": 1, "monitor": "dev/score"}),
        (lambda: ScoredTask(SCORES), 12, {"epochs": 9, "patience": 2, "val_every_steps": 3, "monitor": "dev/score"}),
    ],
)
def test_killed_right_after_the_save_of_the_last_step(
    tmp_path: Path, make: Any, num_steps: int, settings: dict[str, Any]
) -> None:
    """The resumed run does all that was left: the epoch's record, the last validation, the end."""
    common = {**settings, "save_every_steps": num_steps, "keep_best": 0}
    whole = opened(make(), tmp_path / "whole", **common)
    expected = train(whole)
    assert expected.num_steps == num_steps
    killed_after_saving(opened(make(), tmp_path / "run", **common), num_steps)
    validated = len(validations_of(tmp_path / "run"))
    task = ScoredTask(SCORES[validated:]) if isinstance(make(), ScoredTask) else make()
    again = opened(task, tmp_path / "run", resume="auto", **common)
    result = train(again)
    assert (result.status, result.num_steps, task.seen) == (expected.status, num_steps, [])
    assert what_was_computed(tmp_path / "run") == what_was_computed(tmp_path / "whole")
    assert validations_of(tmp_path / "run") == validations_of(tmp_path / "whole")
    assert read(tmp_path / "run" / "metrics.jsonl") == read(tmp_path / "whole" / "metrics.jsonl")
    assert again.position == whole.position
    assert_same(weights(again), weights(whole))


def train_or_die(link: Link, out: str, dies: bool) -> None:
    first = opened(SmallTask(), Path(out), link, grains=2, steps=4, save_every_steps=4, resume="auto", progress="none")
    if dies:
        sync, saved = first.stepper.sync, []
        save = first.checkpoints.save

        def note(run: RunState, score: float | None) -> None:
            save(run, score)
            saved.append(first.stepper.num_steps)

        def die() -> None:
            if saved[-1:] == [4]:
                first.checkpoints.close()  # on disk
                os.kill(os.getpid(), signal.SIGKILL)
            sync()

        first.checkpoints.save, first.stepper.sync = note, die  # type: ignore[method-assign]
    train(first)


def test_killed_for_real_on_two_ranks(tmp_path: Path) -> None:
    assert KILLED in run_until_death(2, train_or_die, str(tmp_path / "run"), True)
    assert [record["steps"] for record in epochs(tmp_path / "run")] == [3], "the second epoch was not ended"
    assert run_until_death(2, train_or_die, str(tmp_path / "run"), False) == [0, 0]
    assert run_until_death(2, train_or_die, str(tmp_path / "whole"), False) == [0, 0]
    assert what_was_computed(tmp_path / "run") == what_was_computed(tmp_path / "whole")
    assert validations_of(tmp_path / "run") == validations_of(tmp_path / "whole")


@pytest.mark.parametrize("settings", [{"save_every_steps": 5}, {"save_every_steps": 6}, {}])
def test_a_diverged_run_accounts_for_the_steps_of_its_last_epoch(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Noticed in mid-epoch, at its end, or when the whole epoch is saved: one record each."""
    result = train(opened(Overflowing(4), tmp_path / "run", epochs=3, **settings))
    assert result.status == "diverged"
    steps = read(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == result.num_steps
    assert [record["steps"] for record in epochs(tmp_path / "run")] == [3, result.num_steps - 3]
    assert sum(record["steps"] for record in epochs(tmp_path / "run")) == len(steps)


def test_a_run_with_too_many_skipped_steps_accounts_for_them(tmp_path: Path) -> None:
    trained = opened(NeverFinite(), tmp_path / "run", epochs=30, max_skipped=5, log_every=50)
    with pytest.raises(TooManySkipped):
        train(trained)
    losses = [record["loss"] for record in read(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] is None, "as the message says"
    assert len(losses) == trained.stepper.num_steps
    assert sum(record["steps"] for record in epochs(tmp_path / "run")) == len(losses)
