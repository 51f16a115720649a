"""Saving under real faults: a full disk, changes during the write, an end of the program; what is kept."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.train.checkpoint import writer as checkpoint_module
from paceline.train.checkpoint.reader import best, load, newest
from paceline.train.checkpoint.snapshot import Snapshot
from paceline.train.checkpoint.writer import Checkpointer, CheckpointFailed, StateNotPlain


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(value: float, count: int = 100) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((count,), value)}}


def test_a_training_run_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    moments = {
        f"{index}.{key}": value
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }
    state = {
        "position": {"stage": 0, "epoch": 3, "step": 7},
        "seed": 2**63,
        "lr": 0.1,
        "best": float("inf"),
        "name": "ä",
    }
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    checkpointer.save(120, {"model": model.state_dict(), "optimizer": moments}, state, score=0.25)
    checkpointer.close()

    path = tmp_path / "run" / "checkpoints" / "step-00000120"
    assert names(path) == ["digests.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    read = load(path)
    assert (read.step, read.score, read.state, read.path) == (120, 0.25, state, path)
    for part, expected in (("model", model.state_dict()), ("optimizer", moments)):
        by_library = load_file(path / f"{part}.safetensors")
        assert by_library.keys() == read.parts[part].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(by_library[name], value), name
            assert torch.equal(read.parts[part][name], value), name


@pytest.fixture
def held_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background writes wait until this is set."""
    released = threading.Event()
    write = Snapshot.write

    def late(self: Snapshot, path: Path) -> object:
        assert released.wait(60)
        return write(self, path)

    monkeypatch.setattr(Snapshot, "write", late)
    yield released
    released.set()


def test_what_was_saved_is_the_state_at_the_call_although_training_goes_on(
    tmp_path: Path, held_write: threading.Event
) -> None:
    parts = weights(1.0)
    state = {"losses": [1.0]}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts, state)
    parts["model"]["w"].fill_(2.0)
    state["losses"].append(2.0)
    assert newest(tmp_path).checkpoint is None
    held_write.set()
    checkpointer.wait()
    read = load(tmp_path / "step-00000001")
    assert torch.equal(read.parts["model"]["w"], torch.ones(100))
    assert read.state == {"losses": [1.0]}
    checkpointer.close()


def test_a_second_save_waits_for_the_first_and_counts_it_as_stall(
    tmp_path: Path, held_write: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = 0.0
    wait_for = checkpoint_module.wait_for

    def wait_five_seconds(pending: list[object]) -> None:
        nonlocal clock_s
        clock_s += 5.0
        held_write.set()
        wait_for(pending)  # type: ignore[type-var]

    monkeypatch.setattr(checkpoint_module, "wait_for", wait_five_seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, weights(1.0), {})
    assert checkpointer.stall_s == 0.0
    checkpointer.save(2, weights(2.0), {})
    assert (tmp_path / "step-00000001").exists()
    assert checkpointer.stall_s == 5.0
    checkpointer.wait()
    assert checkpointer.stall_s == 10.0
    checkpointer.close()
    assert torch.equal(load(tmp_path / "step-00000001").parts["model"]["w"], torch.ones(100))
    assert torch.equal(load(tmp_path / "step-00000002").parts["model"]["w"], torch.full((100,), 2.0))


def test_a_foreground_save_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, background=False)
    checkpointer.save(1, weights(1.0), {})
    assert load(tmp_path / "step-00000001").step == 1
    checkpointer.close()


def test_state_that_json_would_change_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for state, where in (
        ({"a": {1: 2}}, "the key 1 of state.a"),
        ({"a": [0, torch.ones(1)]}, r"state.a\[1\] is a Tensor"),
        ({"a": {1, 2}}, "state.a is a set"),
    ):
        with pytest.raises(StateNotPlain, match=where):
            checkpointer.save(1, weights(1.0), state)
    checkpointer.close()
    assert names(tmp_path) == []


class TestRetention:
    def steps(self, folder: Path) -> list[int]:
        assert all(name.startswith("step-") for name in names(folder))
        return [int(name[5:]) for name in names(folder)]

    def save_all(self, checkpointer: Checkpointer, scores: dict[int, float | None]) -> None:
        for step, score in scores.items():
            checkpointer.save(step, weights(float(step)), {}, score)
        checkpointer.close()

    @pytest.mark.parametrize(("mode", "kept", "top"), [("min", [3, 5, 6], 3), ("max", [1, 5, 6], 1)])
    def test_the_last_and_the_best_stay(self, mode: str, kept: list[int], top: int, tmp_path: Path) -> None:
        scores = {1: 9.0, 2: 5.0, 3: 1.0, 4: 7.0, 5: None, 6: float("nan")}
        self.save_all(Checkpointer(tmp_path, keep_last=2, keep_best=1, mode=mode), scores)
        assert self.steps(tmp_path) == kept
        found = best(tmp_path)
        assert found.checkpoint is not None
        assert (found.checkpoint.step, found.checkpoint.score) == (top, scores[top])

    def test_several_best_and_of_equals_the_newest(self, tmp_path: Path) -> None:
        self.save_all(Checkpointer(tmp_path, keep_last=1, keep_best=2), {1: 3.0, 2: 3.0, 3: 2.0, 4: 3.0, 5: 8.0})
        assert self.steps(tmp_path) == [3, 4, 5]

    def test_without_best_only_the_last_stay_and_without_scores_nothing_is_best(self, tmp_path: Path) -> None:
        self.save_all(Checkpointer(tmp_path, keep_last=1, keep_best=0), {1: 0.0, 2: 5.0, 3: None})
        assert self.steps(tmp_path) == [3]
        assert best(tmp_path).checkpoint is None

    def test_a_broken_best_gives_way_to_the_second(self, tmp_path: Path) -> None:
        self.save_all(Checkpointer(tmp_path, keep_last=3), {1: 1.0, 2: 2.0, 3: 3.0})
        (tmp_path / "step-00000001" / "model.safetensors").unlink()
        found = best(tmp_path)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 2
        assert [error.path.name for error in found.broken] == ["step-00000001"]

    def test_saving_a_step_again_replaces_it(self, tmp_path: Path) -> None:
        checkpointer = Checkpointer(tmp_path, keep_last=1)
        checkpointer.save(4, weights(1.0), {})
        checkpointer.save(4, weights(2.0), {"again": True}, score=0.5)
        checkpointer.close()
        assert names(tmp_path) == ["step-00000004"]
        assert load(tmp_path / "step-00000004").state == {"again": True}

    def test_later_steps_of_a_line_that_was_left_are_put_aside_not_deleted(self, tmp_path: Path) -> None:
        self.save_all(Checkpointer(tmp_path, keep_last=3), {10: None, 20: 1.0, 30: None})
        self.save_all(Checkpointer(tmp_path, keep_last=3), {15: 2.0})
        assert names(tmp_path) == ["left-step-00000020", "left-step-00000030", "step-00000010", "step-00000015"]
        assert load(tmp_path / "left-step-00000030").step == 30
        for find in (newest, best):
            checkpoint = find(tmp_path).checkpoint
            assert checkpoint is not None
            assert checkpoint.step == 15

    def test_leftovers_of_a_killed_run_are_cleaned_at_start(self, tmp_path: Path) -> None:
        self.save_all(Checkpointer(tmp_path), {1: None, 2: None})
        for leftover in (".writing-step-00000009", ".removing-step-00000001"):
            (tmp_path / leftover).mkdir()
            (tmp_path / leftover / "model.safetensors").write_bytes(b"half")
        (tmp_path / "notes.txt").write_text("the user's own")
        Checkpointer(tmp_path).close()
        assert names(tmp_path) == ["notes.txt", "step-00000001", "step-00000002"]


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no right to mount: {mount.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def file_size_limit(folder: Path, num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("limit", "reason"), [(small_disk, "No space left"), (file_size_limit, "File too large")])
def test_a_full_disk_is_reported_at_the_next_call_and_costs_nothing_else(
    limit: object, reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with limit(folder, 2**20):  # type: ignore[operator]
        checkpointer = Checkpointer(folder, keep_last=1)
        checkpointer.save(1, weights(1.0), {"sound": True})
        checkpointer.save(2, weights(2.0, count=2**19), {})
        with pytest.raises(CheckpointFailed, match=reason) as failure:
            checkpointer.wait()
        assert failure.value.path == folder / "step-00000002"
        assert str(failure.value.path) in str(failure.value)
        assert names(folder) == ["step-00000001"]
        assert load(folder / "step-00000001").state == {"sound": True}

        checkpointer.save(3, weights(3.0, count=2**19), {})
        with pytest.raises(CheckpointFailed, match="step-00000003"):
            checkpointer.save(4, weights(4.0), {})
        checkpointer.save(5, weights(5.0), {})
        checkpointer.close()
        assert names(folder) == ["step-00000005"]


def test_a_folder_that_cannot_be_made_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match="Not a directory"):
        Checkpointer(tmp_path / "file" / "checkpoints")


def test_a_write_outlives_the_end_of_the_program(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, torch\n"
        "from paceline.train.checkpoint.writer import Checkpointer\n"
        "Checkpointer(pathlib.Path(sys.argv[1])).save(1, {'model': {'w': torch.ones(2**22)}}, {})\n"
        "raise SystemExit('the run failed here')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False, text=True
    )
    assert "the run failed here" in process.stderr
    assert load(tmp_path / "step-00000001").step == 1
