"""A run that goes on: from the newest sound checkpoint, from one that is named, after a polite stop."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.settings import TrainConfig
from paceline.core.run_folder import RunExists
from paceline.observe.journal import read
from paceline.train import loop
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint.format import listed, step_of
from paceline.train.checkpoint.state import WeightsMisfit
from paceline.train.resume import SettingsChanged
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.crash import run_until_death
from tests.ranks import RanksFailed, run_ranks
from tests.train.ragged import RaggedTask
from tests.train.small import (
    ScoredTask,
    SmallTask,
    assert_same,
    fresh_net,
    opened,
    raw_steps,
    sgd,
    validations_of,
    weights,
)

# -- where to go on ----------------------------------------------------------------------------------------------------


def test_resume_auto_where_there_is_nothing_starts_fresh(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "absent", tmp_path / "empty"):
        ours = opened(SmallTask(), folder, steps=3, resume="auto")
        model = fresh_net()
        list(raw_steps(model, sgd(model), 3))
        assert loop.train(ours).num_steps == 3
        assert_same(weights(ours), model.state_dict())


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.train(opened(SmallTask(), tmp_path / "run", epochs=2))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    task = SmallTask()
    result = loop.train(opened(task, tmp_path / "run", epochs=2, resume="auto"))
    assert (result.status, result.num_steps, task.seen) == ("finished", 6, [])
    assert "this run is finished" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    mark = tmp_path / "run" / "run.json"
    assert json.loads(after.pop(mark))["status"] == json.loads(before.pop(mark))["status"] == "finished"
    assert after == before


@pytest.mark.parametrize("first", [{"epochs": 2}, {"steps": 4, "epochs": 4}, {"patience": 2, "epochs": 4}])
def test_a_finished_run_may_be_given_more(tmp_path: Path, first: dict[str, Any]) -> None:
    """From where it ended, also in the middle of an epoch: as if it had been allowed that much from the beginning."""
    scores, later = [2.0, 1.0, *[3.0] * 6], {"val_every_steps": 2, "monitor": "dev/score"}
    whole = opened(ScoredTask(scores), tmp_path / "whole", epochs=4, **later)
    loop.train(whole)
    began = loop.train(opened(ScoredTask(scores), tmp_path / "run", **first, **later))
    assert began.num_steps < 12
    again = loop.train(opened(ScoredTask([3.0] * 6), tmp_path / "run", resume="auto", **first, **later))
    assert (again.status, again.num_steps) == (began.status, began.num_steps), "nothing more was allowed"
    more = opened(ScoredTask([3.0] * 6), tmp_path / "run", epochs=4, resume="auto", allow_change=True, **later)
    assert loop.train(more).num_steps == 12
    assert_same(weights(more), weights(whole))
    assert read(tmp_path / "run" / "metrics.jsonl") == read(tmp_path / "whole" / "metrics.jsonl")


def test_a_broken_newest_checkpoint_is_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"epochs": 2, "save_every_steps": 1, "keep_best": 0}
    whole = opened(SmallTask(), tmp_path / "whole", **settings)
    loop.train(whole)
    stopped = opened(StoppingTask(at_step=4), tmp_path / "run", **settings)
    assert loop.train(stopped).status == "stopped"
    newest, before = listed(tmp_path / "run" / "checkpoints")
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    resumed = opened(SmallTask(), tmp_path / "run", resume="auto", **settings)
    loop.train(resumed)
    said = capsys.readouterr().out
    assert f"skipped a broken checkpoint: {file}: its content is not what was written" in said
    assert f"resumed after step {step_of(before)} ({before.name})" in said
    assert_same(weights(resumed), weights(whole))
    steps = read(tmp_path / "run" / "metrics.jsonl")
    assert steps == read(tmp_path / "whole" / "metrics.jsonl")
    assert [record["step"] for record in steps] == list(range(6))


def test_validation_after_the_last_checkpoint_is_written_down_once(tmp_path: Path) -> None:
    """A checkpoint at the last step of an epoch is older than the look at the end of that epoch."""
    settings = {"epochs": 2, "save_every_steps": 3, "save_every_epochs": None, "keep_last": 9, "keep_best": 0}
    task = ScoredTask([2.0, 1.0])
    loop.train(opened(task, tmp_path / "run", monitor="dev/score", **settings))
    expected = validations_of(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    loop.train(opened(ScoredTask([2.0, 1.0]), tmp_path / "run", monitor="dev/score", resume=path, **settings))
    assert validations_of(tmp_path / "run") == expected
    assert [record["step"] for record in expected] == [2, 5]


def test_a_checkpoint_of_another_run_brings_its_grains_and_settings(tmp_path: Path) -> None:
    settings = {"epochs": 2, "keep_last": 9}
    whole = opened(RaggedTask(), tmp_path / "whole", grains=3, **settings)
    loop.train(whole)
    path = tmp_path / "whole" / "checkpoints" / "step-00000025"
    resumed = opened(RaggedTask(), tmp_path / "other", resume=path, **settings)
    loop.train(resumed)
    assert resumed.resume.grains == 3
    assert_same(weights(resumed), weights(whole))
    with pytest.raises(SettingsChanged, match="lr: 0.05 in the run, 0.5 now"):
        opened(RaggedTask(), tmp_path / "third", resume=path, lr=0.5, **settings)
    with pytest.raises(WeightsMisfit, match="first.weight: not in the model"):
        opened(SmallTask(), tmp_path / "third", resume=path, **settings)
    assert not (tmp_path / "third").exists()


def test_the_grains_a_run_has_are_no_change(tmp_path: Path) -> None:
    loop.train(opened(SmallTask(), tmp_path / "run", steps=2))
    loop.train(opened(SmallTask(), tmp_path / "run", steps=2, grains=1, resume="auto"))
    with pytest.raises(SettingsChanged, match="grains: 1 in the run, 2 now"):
        opened(SmallTask(), tmp_path / "run", steps=2, grains=2, resume="auto")
    changed = opened(SmallTask(), tmp_path / "run", steps=2, grains=2, resume="auto", allow_change=True)
    loop.train(changed)
    assert changed.resume.grains == 2


# -- asked to stop -----------------------------------------------------------------------------------------------------


class StoppingTask(SmallTask):
    """Sends its own process a signal in the middle of a step."""

    def __init__(self, at_step: int, number: signal.Signals = signal.SIGTERM) -> None:
        super().__init__()
        self._at_step, self._number = at_step, number

    def loss(self, model: nn.Module, grain: Any) -> Any:
        if model.training and len(self.seen) == self._at_step:
            os.kill(os.getpid(), self._number)
        return super().loss(model, grain)


class StoppingRaggedTask(RaggedTask):
    def __init__(self, at_step: int, number: signal.Signals) -> None:
        self._at_step, self._number = at_step, number

    def after_step(self, model: nn.Module, step: Any, grains: list[Any]) -> None:
        if step.number == self._at_step:
            os.kill(os.getpid(), self._number)


def train(link: Link, folder: str, stop: tuple[int, int, signal.Signals] | None) -> None:
    """`stop` is (rank, step, signal): that rank alone is asked to stop, after that step."""
    at_step = stop[1] if stop is not None and stop[0] == link.world.rank else -1
    task = StoppingRaggedTask(at_step, stop[2] if stop else signal.SIGTERM)
    settings = {"steps": 14, "grains": 4, "global_batch": 24, "order": "random"}
    run = opened(task, Path(folder), link, resume="auto", save_every_epochs=None, **settings)
    result = loop.train(run)
    ended = {"status": result.status, "steps": result.num_steps}
    (Path(folder) / f"rank{link.world.rank}.json").write_text(json.dumps(ended))
    if result.status == "finished":
        torch.save(weights(run), Path(folder) / f"rank{link.world.rank}.pt")


@pytest.mark.parametrize(
    ("size", "number"),
    [(2, signal.SIGTERM), *(pytest.param(size, signal.SIGUSR1, marks=pytest.mark.long) for size in (1, 4))],
)
def test_one_rank_is_asked_and_all_stop_at_the_same_step(tmp_path: Path, size: int, number: signal.Signals) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_until_death(size, train, str(whole), None) == [0] * size
    asked = size - 1
    assert run_until_death(size, train, str(run), (asked, 10, number)) == [0] * size
    ended = [json.loads((run / f"rank{rank}.json").read_text()) for rank in range(size)]
    # The others learn of it with the next reduction; alone, nobody has to be told. Python may take a signal late.
    assert ended == [ended[0]] * size
    assert ended[0]["status"] == "stopped"
    assert ended[0]["steps"] - (11 if size == 1 else 12) in (0, 1)
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"
    found = restore.newest(run / "checkpoints")
    assert found.broken == []
    assert found.checkpoint is not None
    assert found.checkpoint.step == ended[0]["steps"]
    assert run_until_death(size, train, str(run), None) == [0] * size
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    for rank in range(size):
        ours, theirs = torch.load(run / f"rank{rank}.pt"), torch.load(whole / f"rank{rank}.pt")
        assert_same(ours, theirs)
    assert read(run / "metrics.jsonl") == read(whole / "metrics.jsonl")


# -- a run that failed -------------------------------------------------------------------------------------------------


class BrokenTask(SmallTask):
    def loss(self, model: nn.Module, grain: Any) -> Any:
        raise RuntimeError("a mistake in the task")


def test_a_run_that_failed_before_its_first_checkpoint_may_be_started_over(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a mistake in the task"):
        loop.train(opened(BrokenTask(), tmp_path / "run", epochs=1))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert loop.train(opened(SmallTask(), tmp_path / "run", epochs=1)).status == "finished"
    assert [record["step"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    with pytest.raises(RunExists):
        opened(SmallTask(), tmp_path / "run", epochs=1)


def offset_run(link: Link, folder: str, resume: str) -> None:
    settings: dict[str, Any] = {"dataset_distribution": "random_seed_offset", "grains": 2, "global_batch": 8}
    config = TrainConfig(epochs=1, resume=resume, out=Path(folder), **settings)  # type: ignore[arg-type]
    loop.train(open_run(SmallTask(), config, link))


def test_ranks_that_walk_their_own_way_cannot_become_more(tmp_path: Path) -> None:
    run_ranks(2, offset_run, str(tmp_path / "run"), "no")
    with pytest.raises(RanksFailed, match="2 in the run, 1 now"):
        run_ranks(1, offset_run, str(tmp_path / "run"), "auto")


class GroupSignalTask(StoppingRaggedTask):
    def after_step(self, model: nn.Module, step: Any, grains: list[Any]) -> None:
        if step.number == self._at_step:
            os.killpg(0, self._number)


def train_with_workers(link: Link, folder: str) -> None:
    """A scheduler's signal goes to every process of the job, the loader's workers too."""
    os.setsid()
    task = GroupSignalTask(3, signal.SIGTERM)
    run = opened(task, Path(folder), link, steps=14, global_batch=24, order="random", workers=2)
    result = loop.train(run)
    (Path(folder) / "result.json").write_text(json.dumps([result.status, result.num_steps]))


def test_a_signal_to_the_whole_group_saves_too(tmp_path: Path) -> None:
    assert run_until_death(1, train_with_workers, str(tmp_path / "run")) == [0]
    status, steps = json.loads((tmp_path / "run" / "result.json").read_text())
    assert status == "stopped"
    assert steps in (4, 5)  # Python may take the signal a moment after it was sent
    found = restore.newest(tmp_path / "run" / "checkpoints").checkpoint
    assert found is not None
    assert found.step == steps
