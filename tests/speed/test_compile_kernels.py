"""A dry run compiles in threads what it would have launched, in backward too, and leaves launching as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from paceline.speed import compile_kernels as compiling

pytest.importorskip("triton")
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction


class Compiler:
    """Stands in for Triton's launch: notes how it is called, and compiles in the mode that is active."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.threads: set[str] = set()

    def run(self, name: str, *, grid: Any, warmup: bool) -> None:
        self.calls.append((name, warmup))
        mode = _async_compile.active_mode.get()
        if mode is not None:
            mode.submit(name, lambda: self._compile(name), lambda kernel: None)

    def _compile(self, name: str) -> str:
        self.threads.add(threading.current_thread().name)
        if name == "broken":
            raise RuntimeError("no such instruction")
        return name


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(JITFunction, "run", lambda name, **rest: made.run(name, **rest))
    return made


def launch(name: str) -> None:
    JITFunction.run(name, grid=(1,), warmup=False)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        launch("forward")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        launch("backward")
        return 2 * gradient


def test_nothing_is_launched_and_each_kernel_is_compiled_once(compiler: Compiler) -> None:
    assert compiling.can_run_dry()
    before, shown = JITFunction.run, []
    with compiling.dry(lambda done, total: shown.append((done, total)), num_threads=2):
        x = torch.ones(3, requires_grad=True)
        for _ in range(3):
            Twice.apply(x).sum().backward()
        launch("broken")
    assert compiler.calls == [("forward", True), ("backward", True)] * 3 + [("broken", True)]
    assert shown == [(1, 3), (2, 3), (3, 3)]  # one that fails is left to its launch
    assert all(name.startswith("compile") for name in compiler.threads)
    assert JITFunction.run is before
    launch("again")
    assert compiler.calls[-1] == ("again", False)


def test_a_failing_step_leaves_launching_as_it_was(compiler: Compiler) -> None:
    before = JITFunction.run

    def fails() -> None:
        with compiling.dry():
            launch("forward")
            raise ValueError("garbage")

    with pytest.raises(ValueError, match="garbage"):
        fails()
    assert JITFunction.run is before
    assert _async_compile.active_mode.get() is None
