"""A run restores the process as it was, and torch and other libraries can read its state meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.data.grain import Batch, Grain
from paceline.world.discover.environment import World
from paceline.world.start import start
from tests.train.apart import WeightedTask

LEGACY: dict[str, Callable[[], Any]] = {
    "cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "float32": torch.get_float32_matmul_precision,
}


def seen() -> dict[str, Any]:
    """What other code sees of the process."""
    backends: Any = torch.backends
    numbers: Any = np.random.get_state()
    return {
        **{name: read() for name, read in LEGACY.items()},
        "precisions": [
            backends.cuda.matmul.fp32_precision,
            backends.cudnn.conv.fp32_precision,
            backends.cudnn.rnn.fp32_precision,
            backends.mkldnn.matmul.fp32_precision,
            backends.mkldnn.conv.fp32_precision,
            backends.mkldnn.rnn.fp32_precision,
        ],
        "threads": torch.get_num_threads(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": numbers[1].tolist(),
        "python": random.getstate(),
        "tag": torch.compiler.config.cache_key_tag,
        "group": torch.distributed.is_initialized(),
    }


def own_loop() -> None:
    engine = paceline.Engine(level=0, device="cpu", threads=1)
    model = nn.Linear(3, 2)
    model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(grain: Grain) -> tuple[Tensor, int]:
        return model(grain.data).square().sum(), 4

    engine.step(loss, Batch(0, 0, 1, 4, 4.0, [Grain(torch.ones(4, 3), 0, np.arange(4))]))
    engine.close()


class Fails(WeightedTask):
    def loss(self, model: nn.Module, grain: Any) -> Any:
        raise RuntimeError("a bug")


class FailsInThird(WeightedTask):
    def loss(self, model: nn.Module, grain: Any) -> Any:
        if model.training and len(self.seen) >= 64:
            raise RuntimeError("a bug")
        return super().loss(model, grain)


def whole_run(folder: Path, task: paceline.Task | None = None) -> None:
    paceline.fit(task or WeightedTask(has_norm=True), epochs=1, level=0, device="cpu", threads=1, out=folder)


@pytest.mark.parametrize("way", ["engine", "fit", "failing fit"])
def test_the_process_is_given_back(tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(3)
    try:
        before = seen()
        if way == "engine":
            own_loop()
        elif way == "fit":
            whole_run(tmp_path / "run")
        else:
            with pytest.raises(RuntimeError, match="a bug"):
                whole_run(tmp_path / "run", Fails(has_norm=True))
        assert seen() == before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_engines_either_may_be_closed_first(first: int) -> None:
    """Before, the second to close gave back what the first had set."""
    before = seen()
    engines = [paceline.Engine(level=0, device="cpu", threads=1), paceline.Engine(level=0, device="cpu", threads=2)]
    engines[first].close()
    engines[1 - first].close()
    engines[first].close()  # once more does nothing
    assert seen() == before
    with pytest.raises(paceline.PacelineError, match="raises it"):
        paceline.Engine(level=3, precision="fp64", device="cpu", threads=1)
    paceline.Engine(level=0, device="cpu", threads=1).close()
    assert seen() == before


def test_an_engine_whose_ranks_have_parted_says_so() -> None:
    """With a group that was an error of torch's, or a step of each rank by itself; closing twice was, too."""
    model = torch.nn.Linear(2, 1)
    data = torch.ones(4, 2)
    with start(World(0, 0, 1, 1, 0, 1, "plain", None), device="cpu", group_of_one=True) as link:
        engine = paceline.Engine(level=0, link=link)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        [batch] = engine.batches(data, global_batch=4)
        other = paceline.Engine(level=0, link=link)
        other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine.close()
    engine.close()  # once more does nothing
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: engine.step(lambda grain: (model(grain.data).sum(), len(grain)), batch),
        "prepare": lambda: engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        "batches": lambda: engine.batches(data, global_batch=4),
        "evaluate": lambda: engine.evaluate(lambda grain: {}, data),
        "close": other.close,
    }
    for name, call in calls.items():
        with pytest.raises(paceline.PacelineError, match=f"engine.{name} was called after the ranks have parted"):
            call()


@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_stays(fails: bool) -> None:
    """Before, those of validation sets stayed, more with every run."""
    before = set(multiprocessing.active_children())
    settings: dict[str, Any] = {"level": 0, "device": "cpu", "workers": 1, "val_every_steps": 1, "progress": "none"}
    with pytest.raises(RuntimeError, match="a bug") if fails else contextlib.nullcontext():
        paceline.fit(FailsInThird() if fails else WeightedTask(), epochs=1, **settings)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_the_caller_stay_outside(mode: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Before, a run inside of another's validation had no gradients, and one under autocast was in bf16."""
    settings: dict[str, Any] = {"epochs": 1, "level": 0, "device": "cpu", "progress": "none"}
    alone = paceline.fit(WeightedTask(), **settings)
    with mode():
        inside = paceline.fit(WeightedTask(), **settings)
        assert not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    assert alone.loss == inside.loss


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_is_closed_by_with(fails: bool) -> None:
    before = seen()
    with contextlib.suppress(KeyboardInterrupt), paceline.Engine(level=0, device="cpu", threads=1) as engine:
        assert engine.device.type == "cpu"
        torch.manual_seed(9)
        if fails:
            raise KeyboardInterrupt
    assert seen() == before


def test_two_threads_cannot_train_at_once() -> None:
    """Before, they drew from one row of random numbers: neither result was that of its seed."""
    settings: dict[str, Any] = {"epochs": 1, "level": 0, "device": "cpu", "progress": "none"}
    said: list[str] = []

    def other() -> None:
        try:
            paceline.fit(WeightedTask(), **settings)
        except paceline.PacelineError as error:
            said.append(str(error))

    class Waits(WeightedTask):
        def after_stage(self, model: nn.Module, stage: int) -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            other()  # one inside of another is fine

    paceline.fit(Waits(), **settings)
    assert len(said) == 1
    assert "another thread of this process is inside paceline.fit" in said[0]
    thread = threading.Thread(target=other)  # after the other is fine
    thread.start()
    thread.join()
    assert len(said) == 1


def test_torch_is_not_heard_to_warn_of_its_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions do, where this one may not; any other warning is heard."""

    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=1)

    setting = "Please use the new API settings to control TF32 behavior, such as torch.backends."
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: warn(setting))
    paceline.Engine(level=0, device="cpu").close()
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: warn("something else"))
    with pytest.raises(UserWarning, match="something else"):
        paceline.Engine(level=0, device="cpu")


@pytest.mark.parametrize("mode", ["ieee", "tf32"])
def test_other_libraries_can_read_and_set_precisions_while_an_engine_works(mode: str) -> None:
    """What they set is theirs: the engine's `close` gives back what was there before it."""
    engine = paceline.Engine(level=0, device="cpu")
    if mode == "tf32":
        from paceline.speed import precision

        chosen = precision.resolve(1, None, precision.Capabilities("cuda", "a GPU", True, True, True, True))
        assert chosen.fp32_matmul == "tf32"
        precision.apply(chosen)
    try:
        assert {name: read() for name, read in LEGACY.items()} == {
            "cudnn": mode == "tf32",
            "matmul": mode == "tf32",
            "float32": "high" if mode == "tf32" else "highest",
        }
        with torch.backends.cudnn.flags(enabled=True):
            pass
        torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    finally:
        engine.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell the difference")
def test_threads_that_the_environment_asks_for_are_respected() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"  # conftest.py
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = paceline.Engine(level=0, device="cpu")
        assert torch.get_num_threads() == 1
        engine.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
