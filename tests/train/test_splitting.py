"""A batch that does not fit the memory is cut finer, and the run goes on: with the bits of that many grains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import PacelineError
from paceline.core.errors import TaskContract
from paceline.observe.journal import read
from paceline.train.loss import OutOfMemory
from paceline.train.splitting import next_cut


class Small(paceline.Task):
    """Has room for `room` samples at once; a real device says it in the same words."""

    def __init__(self, room: int = 1000, from_step: int = 0, kind: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.room, self.from_step, self.kind = room, from_step, kind
        self.calls = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))

    def train_data(self) -> Any:
        random = torch.Generator(device="cpu").manual_seed(1)
        x = torch.randn(64, 4, generator=random, dtype=torch.float32, device="cpu")
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

    def val_data(self) -> dict[str, Any]:
        return {"val": self.train_data()}

    def loss(self, model: nn.Module, grain: paceline.Grain) -> tuple[torch.Tensor, int]:
        x, y = grain.data
        self.calls += 1
        if len(y) > self.room and self.calls > self.from_step:
            raise self.kind("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes")
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


SETTINGS: dict[str, Any] = {"epochs": 3, "global_batch": 16, "progress": "none", "loggers": (), "eval_batch": 4}


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read(run / "metrics.jsonl") if line["kind"] == "step"]


def test_a_run_that_never_fitted_is_one_with_more_grains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.fit(Small(room=5), out=tmp_path / "split", split_on_oom=True, **SETTINGS)
    said = capsys.readouterr().out
    assert "out of memory on a grain of 16 samples: going on from the beginning with 2 grains per step" in said
    assert "out of memory on a grain of 8 samples: going on from the beginning with 4 grains per step" in said
    paceline.fit(Small(), out=tmp_path / "four", grains=4, **SETTINGS)
    assert losses(tmp_path / "split") == losses(tmp_path / "four")
    assert len(losses(tmp_path / "four")) == 12


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 4 steps of an epoch, and its checkpoint; in the 6th step there is no room any more.
    paceline.fit(Small(room=8, from_step=5), out=tmp_path / "split", split_on_oom=True, **SETTINGS)
    assert "going on from step-00000004 with 2 grains per step instead of 1" in capsys.readouterr().out
    by_hand = {**SETTINGS, "out": tmp_path / "hand"}
    paceline.fit(Small(), **{**by_hand, "epochs": 1})
    paceline.fit(Small(), grains=2, regrain=True, resume="auto", **by_hand)
    assert losses(tmp_path / "split") == losses(tmp_path / "hand")


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_cpu_has_other_words_for_it(kind: type[Exception], tmp_path: Path) -> None:
    result = paceline.fit(Small(room=8, kind=kind), split_on_oom=True, **{**SETTINGS, "epochs": 1})
    assert (result.status, result.num_steps) == ("finished", 4)
    assert result.model is not None


def test_without_the_setting_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="out of memory on a grain of 16 samples") as full:
        paceline.fit(Small(room=8), **SETTINGS)
    assert "`--split-on-oom`" in full.value.hint


def test_where_no_cut_helps_it_is_an_error() -> None:
    with pytest.raises(OutOfMemory, match="a grain of [12] sample"):
        paceline.fit(Small(room=0), split_on_oom=True, **SETTINGS)


def test_other_errors_stay_errors() -> None:
    class Broken(Small):
        def loss(self, model: nn.Module, grain: paceline.Grain) -> tuple[torch.Tensor, int]:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        paceline.fit(Broken(), split_on_oom=True, **SETTINGS)


def test_cuts() -> None:
    assert next_cut(1, 16, None) == 2
    assert next_cut(4, 2, 4) == 8
    assert next_cut(8, 2, 2) is None
    assert next_cut(4, 1, 2) is None


def test_several_ranks_are_refused() -> None:
    from paceline.train.splitting import SplitNeedsOneRank

    error = SplitNeedsOneRank(2)
    assert isinstance(error, PacelineError)
    assert "paceline tune TASK --procs 2 --knobs grains" in error.hint


def test_a_task_that_cannot_be_put_back_is_refused() -> None:
    """It was a traceback of `copy`, before the first step."""
    task = Small()
    task.guard = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TaskContract, match="its attribute `guard` cannot be copied: TypeError: "):
        paceline.fit(task, split_on_oom=True, **SETTINGS)
