"""What is seen of a run: who is told what, in which order, on which rank, and where the time went."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.core.errors import NotInstalled
from paceline.observe import loggers
from paceline.observe.callback import Record, RunInfo, Watcher
from paceline.observe.clock import PHASES
from paceline.observe.journal import read
from paceline.train.logbook import notes
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.train.task import HasStages, Stage
from paceline.world.link import Link
from tests.observe.test_loggers import read_tensorboard
from tests.observe.test_progress import HIDE_CURSOR, SHOW_CURSOR, Terminal
from tests.ranks import ranks
from tests.train.ragged import RaggedTask
from tests.train.small import BATCH, NUM_SAMPLES, STEPS_PER_EPOCH, SmallTask, alone, opened, points


class Diary(Watcher):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def start(self, info: RunInfo) -> None:
        self.told.append(("start", info))

    def step(self, records: list[Record]) -> None:
        self.told.append(("step", [record["step"] for record in records]))

    def epoch(self, record: Record) -> None:
        self.told.append(("epoch", record["epoch"]))

    def validation(self, record: Record) -> None:
        self.told.append(("validation", record["step"]))

    def end(self, status: str) -> None:
        self.told.append(("end", status))


class Stubborn(Watcher):
    def end(self, status: str) -> None:
        raise OSError("no network")


class Watched(SmallTask):
    def __init__(self) -> None:
        super().__init__()
        self.diary = Diary()

    def watchers(self) -> Sequence[Watcher]:
        return [self.diary]


SETTINGS: dict[str, Any] = {
    **{"global_batch": BATCH, "order": "none", "optimizer": "sgd", "level": 0, "workers": 0},
    **{"device": "cpu", "threads": 1},
}


def test_watchers_of_the_task_and_of_the_call_are_told_alike(tmp_path: Path) -> None:
    task, given = Watched(), Diary()
    paceline.fit(task, out=tmp_path / "run", epochs=2, log_every=2, watchers=[given], **SETTINGS)
    assert task.diary.told == given.told
    (name, info), *rest = given.told
    assert name == "start"
    assert (info.task, info.folder, info.next_step, info.world_size) == ("Watched", tmp_path / "run", 0, 1)
    assert info.settings["epochs"] == 2
    assert rest == [
        ("step", [0, 1]),
        ("step", [2]),
        ("epoch", 1),
        ("validation", 2),
        ("step", [3]),
        ("step", [4, 5]),
        ("epoch", 2),
        ("validation", 5),
        ("end", "finished"),
    ]


def test_a_failed_run_ends_every_watcher_and_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")

    class Failing(Watched):
        def loss(self, model: nn.Module, grain: Any) -> Any:
            if len(self.seen) == 4:
                raise RuntimeError("out of luck")
            return super().loss(model, grain)

    task, last = Failing(), Diary()
    with pytest.raises(RuntimeError, match="out of luck"):
        train(open_run(task, paceline.TrainConfig(epochs=2, **SETTINGS), alone(), [Stubborn(), last]))
    assert task.diary.told[-1] == last.told[-1] == ("end", "failed")
    shown = terminal.getvalue()
    assert "Stubborn could not end: OSError: no network" in shown
    assert HIDE_CURSOR in shown
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)


def test_a_watcher_that_cannot_end_fails_a_run_that_went_well_but_not_its_neighbours() -> None:
    last = Diary()
    with pytest.raises(OSError, match="no network"):
        train(open_run(SmallTask(), paceline.TrainConfig(epochs=1, **SETTINGS), alone(), [Stubborn(), last]))
    assert last.told[-1] == ("end", "finished")


def test_the_default_logger_may_be_missing_but_not_one_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "_is_installed", lambda package: False)
    with pytest.raises(NotInstalled):
        opened(SmallTask(), tmp_path / "asked", epochs=1, loggers=("tensorboard",))
    assert not (tmp_path / "asked").exists(), "a mistake leaves nothing behind"
    train(opened(SmallTask(), tmp_path / "default", epochs=1))
    assert capsys.readouterr().out.count("tensorboard is not installed") == 1
    assert len(read(tmp_path / "default" / "metrics.jsonl")) == STEPS_PER_EPOCH


def test_tensorboard_after_a_resume_shows_every_step_once(tmp_path: Path) -> None:
    first = opened(SmallTask(), tmp_path / "run", epochs=3, log_every=1, save_every_epochs=2, keep_best=0)
    save = first.checkpoints.save
    first.checkpoints.save = lambda *args, **more: save(*args, **more) if first.stepper.num_steps <= 6 else None  # type: ignore[method-assign]
    train(first)
    train(opened(SmallTask(), tmp_path / "run", epochs=3, log_every=1, resume="auto", allow_change=True))
    shown = read_tensorboard(tmp_path / "run" / "tensorboard")
    written = [(record["step"], record["loss"]) for record in read(tmp_path / "run" / "metrics.jsonl")]
    assert [step for step, _ in shown["loss"]] == [step for step, _ in written] == list(range(9))
    assert [loss for _, loss in shown["loss"]] == pytest.approx([loss for _, loss in written], rel=1e-6)
    assert [step for step, _ in shown["dev/loss"]] == [2, 5, 8]


@ranks(1, 2)
def test_the_epoch_record_is_of_all_ranks_and_all_time_has_a_name(link: Link, folder: Path) -> None:
    task, began = Watched(), time.perf_counter()
    ours = opened(task, folder / "run", link, epochs=3, grains=2, order="random", log_every=2)
    result = train(ours)
    wall_s = time.perf_counter() - began
    # A busy machine may take this process off its core between the last lap and the line above.
    assert sum(result.seconds.values()) == pytest.approx(wall_s, rel=0.01, abs=0.1)
    assert tuple(result.seconds) == PHASES
    assert bool(task.diary.told) == link.is_first, "only the first rank has watchers"
    if not link.is_first:
        return
    records = read(folder / "run" / "metrics.jsonl", "epoch")
    losses = [record["loss"] for record in read(folder / "run" / "metrics.jsonl")]
    assert [record["step"] for record in records] == [2, 5, 8]
    for epoch, record in enumerate(records):
        assert (record["epoch"], record["steps"], record["samples"]) == (epoch + 1, STEPS_PER_EPOCH, NUM_SAMPLES)
        assert record["loss"] == pytest.approx(sum(losses[3 * epoch : 3 * epoch + 3]) / 3)
        assert record["padding"] is None, "samples without lengths"
        seconds = record["seconds"]
        assert len(seconds) == link.world.size
        assert all(tuple(rank) == PHASES for rank in seconds)
        longest = max(sum(rank.values()) for rank in seconds)
        assert record["objects_per_s"] == pytest.approx(NUM_SAMPLES / longest, rel=0.01)
        total, data = (sum(values) for values in zip(*((sum(r.values()), r["data"]) for r in seconds), strict=True))
        assert record["computing"] == pytest.approx(1 - data / total, abs=0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@ranks(1, 2)
def test_several_ranks_have_a_log_file_each(link: Link, folder: Path) -> None:
    train(opened(SmallTask(), folder / "run", link, epochs=1, grains=2))
    link.barrier()
    files = sorted(path.name for path in (folder / "run").glob("logs/*"))
    assert files == (["rank-0.log", "rank-1.log"] if link.world.size == 2 else [])
    if link.world.size == 2:
        lines = (folder / "run" / "logs" / f"rank-{link.world.rank}.log").read_text()
        assert f"rank {link.world.rank} of 2, cpu, 1 thread" in lines
        assert "train epoch 1, finished after 3 steps" in lines


@ranks(2)
def test_rank_logs_may_be_left_out(link: Link, folder: Path) -> None:
    train(opened(SmallTask(), folder / "run", link, epochs=1, grains=2, rank_logs=False))
    link.barrier()
    assert not (folder / "run" / "logs").exists()


def test_padding_is_that_of_the_grains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = RaggedTask()
    data = task.train_data()
    train(opened(task, tmp_path / "run", epochs=1, global_batch=6))
    lengths, padded = data.lengths, 0.0
    for begin in range(0, len(data), 6):
        part = lengths[begin : begin + 6]
        padded += len(part) * float(max(part))
    expected = 1 - float(sum(lengths)) / padded
    (record,) = read(tmp_path / "run" / "metrics.jsonl", "epoch")
    assert record["padding"] == pytest.approx(expected)
    assert f", padding {100 * expected:.1f}%, " in capsys.readouterr().out


def test_stages_are_named_where_there_are_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Two(SmallTask, HasStages):
        def stages(self) -> Sequence[Stage]:
            return [Stage("first", points(8, seed=1)), Stage("second", points(16, seed=2))]

    train(opened(Two(), tmp_path / "run", epochs=1))
    shown = capsys.readouterr().out
    assert "train stage first, epoch 1, finished after 1 step, " in shown
    assert "stage second: 16 samples, 2 steps per epoch" in shown
    records = read(tmp_path / "run" / "metrics.jsonl", "epoch")
    assert [(record["stage"], record["samples"]) for record in records] == [("first", 8), ("second", 16)]


def test_step_lines_stay_what_they_are(tmp_path: Path) -> None:
    train(opened(SmallTask(), tmp_path / "run", steps=2))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:2]
    assert [list(json.loads(line)) for line in lines] == [["kind", "step", "epoch", "loss", "lr"]] * 2


def test_a_resumed_run_says_so_in_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(opened(SmallTask(), tmp_path / "run", epochs=1))
    capsys.readouterr()
    task = Watched()
    train(opened(task, tmp_path / "run", epochs=2, resume="auto", allow_change=True, init_from=tmp_path))
    shown = capsys.readouterr().out
    assert re.search(r"^  resumed +after step 3 \(step-00000003\)$", shown, flags=re.MULTILINE)
    assert "`init_from` has no effect on a resumed run" in shown
    assert task.diary.told[0][1].next_step == 3


def test_the_loss_scale_is_in_the_journal_where_there_is_one(tmp_path: Path) -> None:
    plain = opened(SmallTask(), tmp_path / "plain", epochs=1, progress="none", loggers=())
    train(plain)
    assert all("loss_scale" not in record for record in read(tmp_path / "plain" / "metrics.jsonl"))
    half = opened(SmallTask(), tmp_path / "half", epochs=1, log_every=1, precision="fp16", progress="none", loggers=())
    train(half)
    scales = [record.get("loss_scale") for record in read(tmp_path / "half" / "metrics.jsonl")]
    assert None not in scales
    assert scales[-1] == half.stepper.scale.current()


def test_rates_of_layers_are_noted_under_their_names(tmp_path: Path) -> None:
    trained = opened(SmallTask(), tmp_path / "a", epochs=1, larc="clip", progress="none", loggers=())
    train(trained)
    found = notes(trained.stepper, trained.stages.larc)
    assert found.keys() == {f"larc/{name}" for name, _ in trained.stepper.model.named_parameters()}
    assert all(isinstance(rate, float) and torch.isfinite(torch.tensor(rate)) for rate in found.values())
