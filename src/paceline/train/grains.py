"""Forward and backward of one grain: plainly, or by replay of a CUDA graph where its shape has one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from paceline.core.torch_private import backward
from paceline.data.grain import Grain
from paceline.parallel.sharded.blocks import called_whole
from paceline.parallel.strategy import Strategy
from paceline.speed.graphs import Graphs, detached
from paceline.speed.loss_scale import LossScale
from paceline.train.loss import unpack
from paceline.train.scalars import Row, Scalars
from paceline.world.failure.flight_recorder import Doing

Loss = Callable[[Grain], Any]


class GrainPass(Protocol):
    """Forward and backward of the grains of a step, of which this rank has `num_grains`. A loss is divided by `divisor`
    before backward."""

    doing: Doing
    """What a rank that runs steps in this way is doing, for the report on a rank that is lost."""

    def begin_step(self, divisor: float, num_grains: int) -> None: ...

    def forward(self, loss: Loss, grain: Grain) -> tuple[Tensor, Any, Any]:
        """Return (sum, count, outputs)."""
        ...

    def backward(self, total: Tensor) -> None:
        """Add the gradients of the last forward's sum."""
        ...


class PlainPass:
    """Run a grain as PyTorch does, computed in the precision of the level."""

    doing: Doing = "training"

    def __init__(
        self, scale: LossScale, autocast: Callable[[], AbstractContextManager[Any]] | None, has_shards: bool
    ) -> None:
        """`autocast` is None if the level computes in the dtype of the weights."""
        self._scale, self._autocast, self._has_shards = scale, autocast, has_shards
        self._divisor = 1.0

    def begin_step(self, divisor: float, num_grains: int) -> None:
        self._divisor = divisor

    def forward(self, loss: Loss, grain: Grain) -> tuple[Tensor, Any, Any]:
        if self._autocast is None:
            if not self._has_shards:
                return unpack(loss(grain))
            with called_whole(self._has_shards):
                return unpack(loss(grain))
        with self._autocast(), called_whole(self._has_shards):
            return unpack(loss(grain))

    def backward(self, total: Tensor) -> None:
        backward(total, self._scale.seed(total, self._divisor))

    def seed(self, total: Tensor) -> Tensor:
        """Return the gradient that backward of a sum starts from: the loss scale over the divisor."""
        return self._scale.seed(total, self._divisor)


class RecordedPass:
    """Run a grain by replay of a CUDA graph, and plainly where its shape has none.

    The loss sees a grain of `tensors` alone in both cases, so that both compute the same.
    """

    doing: Doing = "training from CUDA graphs"

    def __init__(
        self,
        graphs: Graphs,
        tensors: Callable[[Grain], Any],
        plain: PlainPass,
        strategy: Strategy,
        logged: Scalars | None = None,
    ) -> None:
        """`strategy` is told of replayed backwards, which call no hooks; `logged` takes what a loss logs, which is not
        called in a replay: its numbers are among what the graph computes."""
        self.graphs = graphs
        self._tensors, self._plain, self._strategy, self._logged = tensors, plain, strategy, logged
        self._backward: Callable[[], None] = lambda: None

    def begin_step(self, divisor: float, num_grains: int) -> None:
        self._plain.begin_step(divisor, num_grains)
        self.graphs.start_step(num_grains)

    def warm(self, loss: Loss, grain: Grain) -> bool:
        """Record the shape of this grain, if that is possible; return True if it is recorded."""
        inputs = self._inputs(grain)
        return self.graphs.warm(lambda data: self._run(loss, inputs, data), inputs.data)

    def forward(self, loss: Loss, grain: Grain) -> tuple[Tensor, Any, Any]:
        """Return (sum, count, outputs). A graph holds forward and backward: its replay adds the gradients, too."""
        inputs = self._inputs(grain)
        replay = self.graphs.run(lambda data: self._run(loss, inputs, data), inputs.data, self._plain.seed)
        if replay is not None:
            recorded = replay.recorded
            self._backward = partial(self._strategy.replayed, recorded.used, recorded.marks)
            total, count, (outputs, rows) = replay.results
            if self._logged is not None:
                self._logged.add_all(rows)
            return total, count, outputs
        total, count, outputs = self._plain.forward(loss, inputs)
        self._backward = partial(self._plain.backward, total)
        # What stays of this run on the usual stream must not be met by a recording on another.
        result: tuple[Tensor, Any, Any] = detached((total, count, outputs))
        return result

    def backward(self, total: Tensor) -> None:
        """Run the backward of the last forward, or tell the strategy that its replay has been started."""
        backward, self._backward = self._backward, lambda: None
        backward()

    def _inputs(self, grain: Grain) -> Grain:
        return Grain(self._tensors(grain), grain.number, grain.samples)

    def _run(self, loss: Loss, grain: Grain, data: Any) -> tuple[Tensor, Any, Any]:
        """Return the same as a loss, with its outputs beside what it has logged."""
        inputs = Grain(data, grain.number, grain.samples)
        logged = self._logged
        collecting: AbstractContextManager[list[Row]] = nullcontext([]) if logged is None else logged.collecting()
        with collecting as rows:
            total, count, outputs = self._plain.forward(loss, inputs)
        return total, count, (outputs, rows)
