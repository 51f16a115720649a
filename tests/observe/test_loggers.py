"""Loggers: TensorBoard read back by its own reader, the others against modules that record their calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import Failed, NotInstalled
from paceline.observe import forgiving as forgiving_module
from paceline.observe import loggers
from paceline.observe.callback import Callback, RunInfo
from paceline.observe.forgiving import FIRST_PAUSE_S, Forgiving

READER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
tags = found.Tags()["scalars"]
print(json.dumps({tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags}))
"""


def read_tensorboard(folder: Path) -> dict[str, list[list[float]]]:
    """What TensorBoard sees, in a process of its own: its reader is not free of warnings."""
    pytest.importorskip("tensorboard")
    import json

    answer = subprocess.run([sys.executable, "-c", READER, str(folder)], capture_output=True, text=True, check=True)
    found: dict[str, list[list[float]]] = json.loads(answer.stdout)
    return found


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": step, "epoch": 1, "loss": step / 2, "lr": 0.25} for step in range(first, last)]


def info(folder: Path | None, next_step: int = 0) -> RunInfo:
    return RunInfo("Digits", folder, {"lr": 0.25}, next_step)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    writer = loggers.TensorBoard()
    writer.start(info(tmp_path))
    writer.step(steps(0, 10))
    writer.step([*steps(10, 19), {"step": 19, "epoch": 1, "loss": float("nan"), "lr": None}])
    writer.epoch({"kind": "epoch", "step": 19, "epoch": 1, "loss": 4.0, "objects_per_s": 8.0, "padding": None})
    writer.validation({"kind": "validation", "step": 19, "epoch": 1, "dev/loss": 0.5})
    writer.end("finished")
    assert read_tensorboard(tmp_path / "tensorboard") == {
        "loss": [[9, 4.5]],  # one point per log line; what is no number is left out
        "lr": [[9, 0.25]],
        "epoch/number": [[9, 1.0], [19, 1.0]],
        "epoch/loss": [[19, 4.0]],
        "epoch/objects_per_s": [[19, 8.0]],
        "dev/loss": [[19, 0.5]],
    }


@pytest.mark.parametrize("resumed_at", [0, 5])
def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path, resumed_at: int) -> None:
    for first, last in ((0, 8), (resumed_at, 10)):
        writer = loggers.TensorBoard()
        writer.start(info(tmp_path, first))
        for step in range(first, last):
            writer.step([{"step": step, "epoch": 1, "loss": 100.0 * first + step, "lr": None}])
        writer.end("failed")
    found = read_tensorboard(tmp_path / "tensorboard")["loss"]
    assert found == [[step, 100.0 * (resumed_at if step >= resumed_at else 0) + step] for step in range(10)]


def test_tensorboard_without_a_run_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = loggers.TensorBoard()
    writer.start(info(None))
    writer.step(steps(0, 1))
    writer.end("finished")
    assert not list(tmp_path.iterdir())


class Calls(ModuleType):
    """A module that writes down how it was called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def record(self, name: str, answer: Any = None) -> None:
        def call(*args: Any, **named: Any) -> Any:
            self.calls.append((name, args, named))
            return answer

        setattr(self, name, call)


def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> Calls:
    module = Calls("wandb")
    for name in ("log", "finish"):
        module.record(name)
    module.record("init", SimpleNamespace(id="abc", log=module.log, finish=module.finish))
    module.__dict__["run"] = None
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> Calls:
    module = Calls("mlflow")
    for name in ("log_params", "log_metrics", "end_run"):
        module.record(name)
    module.record("start_run", SimpleNamespace(info=SimpleNamespace(run_id="abc")))
    module.__dict__["active_run"] = lambda: None
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def use(name: str, folder: Path, next_step: int, status: str) -> None:
    (logger,), missing = loggers.build([name], is_asked=True)
    assert not missing
    logger.start(info(folder, next_step))
    logger.step(steps(next_step, next_step + 2))
    logger.validation({"kind": "validation", "step": next_step + 1, "epoch": 1, "dev/loss": 0.5})
    logger.end(status)


def test_wandb_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = fake_wandb(monkeypatch)
    use("wandb", tmp_path, 0, "failed")
    use("wandb", tmp_path, 2, "finished")
    begin = {"name": tmp_path.name, "dir": str(tmp_path), "config": {"lr": 0.25}, "resume": "allow"}
    assert wandb.calls == [
        ("init", (), {**begin, "id": None}),
        ("log", ({"loss": 0.5, "lr": 0.25, "epoch/number": 1},), {"step": 1}),
        ("log", ({"dev/loss": 0.5},), {"step": 1}),
        ("finish", (), {"exit_code": 1}),
        ("init", (), {**begin, "id": "abc"}),
        ("log", ({"loss": 1.5, "lr": 0.25, "epoch/number": 1},), {"step": 3}),
        ("log", ({"dev/loss": 0.5},), {"step": 3}),
        ("finish", (), {"exit_code": 0}),
    ]


def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = fake_mlflow(monkeypatch)
    use("mlflow", tmp_path, 0, "stopped")
    use("mlflow", tmp_path, 2, "early")
    assert mlflow.calls == [
        ("start_run", (), {"run_name": tmp_path.name}),
        ("log_params", ({"lr": "0.25"},), {"run_id": "abc"}),
        ("log_metrics", ({"loss": 0.5, "lr": 0.25, "epoch/number": 1},), {"step": 1, "run_id": "abc"}),
        ("log_metrics", ({"dev/loss": 0.5},), {"step": 1, "run_id": "abc"}),
        ("end_run", (), {"status": "KILLED"}),
        ("start_run", (), {"run_id": "abc"}),
        ("log_metrics", ({"loss": 1.5, "lr": 0.25, "epoch/number": 1},), {"step": 3, "run_id": "abc"}),
        ("log_metrics", ({"dev/loss": 0.5},), {"step": 3, "run_id": "abc"}),
        ("end_run", (), {"status": "FINISHED"}),
    ]


def test_a_run_that_starts_over_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = fake_wandb(monkeypatch)
    use("wandb", tmp_path, 0, "failed")
    use("wandb", tmp_path, 0, "finished")
    assert [named["id"] for name, _, named in wandb.calls if name == "init"] == [None, None]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_an_error_only_if_it_was_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda package: None)
    assert loggers.build([name], is_asked=False) == ([], [name])
    with pytest.raises(NotInstalled, match=f"the package {name} is not installed") as caught:
        loggers.build([name], is_asked=True)
    assert f"pip install {name}" in caught.value.hint


class Sulks(Callback):
    """Fails while it is told to."""

    def __init__(self) -> None:
        self.is_down, self.got = False, []  # type: ignore[var-annotated]

    def _take(self, value: Any) -> None:
        if self.is_down:
            raise ConnectionError("the server is gone\nand more lines")
        self.got.append(value)

    def start(self, info: RunInfo) -> None:
        self._take("start")

    def step(self, records: list[Any]) -> None:
        self._take(records[0]["step"])

    def end(self, status: str) -> None:
        self._take(status)


def test_a_logger_that_fails_gets_what_it_missed_later() -> None:
    logger, said, now = Sulks(), [], [0.0]  # type: ignore[var-annotated]
    forgiving = Forgiving(logger, "mlflow", said.append, now=lambda: now[0])
    forgiving.start(info(None))
    forgiving.step(steps(0, 1))
    logger.is_down = True
    forgiving.step(steps(1, 2))
    logger.is_down = False
    now[0] = FIRST_PAUSE_S - 1
    forgiving.step(steps(2, 3))
    assert logger.got == ["start", 0], "it is not asked at every step"
    now[0] = FIRST_PAUSE_S
    forgiving.step(steps(3, 4))
    forgiving.end("finished")
    assert logger.got == ["start", 0, 1, 2, 3, "finished"]
    assert said == ["the logger mlflow failed: ConnectionError: the server is gone; the run goes on, it is tried again"]


def test_a_logger_that_stays_away_costs_few_tries_and_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgiving_module, "MOST_KEPT", 5)
    logger, said, now, tries = Sulks(), [], [0.0], []  # type: ignore[var-annotated]
    forgiving = Forgiving(logger, "mlflow", said.append, now=lambda: now[0])
    forgiving.start(info(None))
    logger.is_down = True
    take = logger._take
    monkeypatch.setattr(logger, "_take", lambda value: (tries.append(now[0]), take(value)))
    for second in range(100):
        now[0] = float(second)
        forgiving.step(steps(second, second + 1))
    forgiving.end("finished")
    assert tries == [0.0, 30.0, 90.0, 99.0, 99.0], "then at the end, and to end"
    assert said[1:] == [
        "the logger mlflow did not get 100 records; metrics.jsonl has them all",
        "the logger mlflow could not end: ConnectionError: the server is gone",
    ]


def test_a_logger_that_does_not_start_ends_a_new_run_and_no_other() -> None:
    logger, said = Sulks(), []  # type: ignore[var-annotated]
    logger.is_down = True
    forgiving = Forgiving(logger, "wandb", said.append, loggers.advice("wandb"))
    with pytest.raises(Failed, match="wandb did not start: ConnectionError: the server is gone") as caught:
        forgiving.start(info(None))
    assert caught.value.hint.endswith("WANDB_MODE=offline, or take wandb out of `loggers`")
    resumed = Forgiving(logger, "wandb", said.append)
    resumed.start(info(None, 7))
    logger.is_down = False
    resumed.step(steps(0, 1))
    resumed.end("finished")
    assert logger.got == []
    assert said == ["the logger wandb did not start: ConnectionError: the server is gone; the run goes on without it"]
