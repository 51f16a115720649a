"""Grains of a task through CUDA graphs, where their shape has one, and plainly where it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.torch_private import compile_counters
from paceline.data.grain import Grain
from paceline.speed.graphs import Graphs, detached

if TYPE_CHECKING:
    from paceline.train.engine import Engine

Loss = Callable[[Grain], Any]
Forward = Callable[[Loss, Grain], tuple[Tensor, Any, Any]]


def counters(engine: Engine) -> dict[str, Any]:
    """What was compiled and recorded so far, for the journal; nothing where neither is done."""
    found: dict[str, Any] = {}
    if engine.precision.compile:
        found["compiled"] = compile_counters().graphs
    if engine.recorded is not None:
        found["graphs"] = engine.recorded.graphs.numbers()
    return found


class RecordedGrains:
    """Forward and backward of a grain, as the engine asks for it.

    The loss sees a grain of `tensors` alone, with or without a graph, so that both compute the same.
    """

    def __init__(self, graphs: Graphs, tensors: Callable[[Grain], Any], forward: Forward) -> None:
        self.graphs = graphs
        self._tensors, self._forward = tensors, forward

    def start_step(self) -> None:
        self.graphs.start_step()

    def warm(self, loss: Loss, grain: Grain) -> bool:
        """Record the shape of this grain, if it can be; whether it is recorded."""
        slim = self._slim(grain)
        return self.graphs.warm(lambda data: self._run(loss, slim, data), slim.data)

    def run(self, loss: Loss, grain: Grain, seed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Any, Any]:
        """(sum, count, outputs), with gradients added; `seed` gives what backward of the sum starts from."""
        slim = self._slim(grain)
        done = self.graphs.run(lambda data: self._run(loss, slim, data), slim.data, seed)
        if done is not None:
            return done
        total, count, outputs = self._forward(loss, slim)
        torch.autograd.backward((total,), (seed(total),))
        # What stays of this run on the usual stream must not be met by a recording on another.
        kept: tuple[Tensor, Any, Any] = detached((total, count, outputs))
        return kept

    def _slim(self, grain: Grain) -> Grain:
        return Grain(self._tensors(grain), grain.number, grain.samples)

    def _run(self, loss: Loss, grain: Grain, data: Any) -> tuple[Tensor, Any, Any]:
        return self._forward(loss, Grain(data, grain.number, grain.samples))
