"""Looking at the model: all validation sets, which of the results counts, and whether it is getting better."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.errors import PacelineError
from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule, Plan
from paceline.train.engine import Engine
from paceline.train.evaluate import evaluate, evaluation_plan
from paceline.train.position import Position
from paceline.train.task import Task


class NotASet(PacelineError):
    """A validation set that cannot be cut into fixed batches."""

    hint = "give a data set with __len__ and __getitem__ and at least one sample, or leave it out of `val_data`"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"validation set {name!r} {why}")
        self.name = name


class UnknownMonitor(PacelineError):
    """The metric to watch is none of those that validation gives."""

    def __init__(self, monitor: str, known: list[str]) -> None:
        super().__init__(f"`monitor` is {monitor!r}, but validation gives {', '.join(known)}")
        nearest = difflib.get_close_matches(monitor, known, n=1, cutoff=0.0)[0]
        self.hint = f"did you mean `--monitor {nearest}`?"


@dataclass(frozen=True)
class _Set:
    loader: Loader
    plan: Plan


class Validation:
    """Every named validation set of a task, cut into fixed batches once and for all."""

    def __init__(self, task: Task, engine: Engine, config: TrainConfig, grains: int) -> None:
        self._task, self._engine, self._config = task, engine, config
        self.metrics: dict[str, float] = {}
        """Of the last time, as `set/metric`."""
        self._rule = BatchRule(
            max_samples=config.eval_batch or max(1, config.max_samples // grains),
            max_cost=None if config.batch_cost is None or config.eval_batch else config.batch_cost / grains,
        )
        self._sets = {name: self._set(name, data) for name, data in task.val_data().items()}
        self._check_monitor()

    def run(self) -> dict[str, float]:
        """Metrics of all sets, the same numbers on every rank; all ranks must call it."""

        def metrics(grain: Grain) -> Mapping[str, tuple[Any, Any]]:
            return self._task.metrics(self._engine.model, grain)

        self.metrics = {}
        limit = self._config.limit_batches
        with self._engine.evaluating():
            for name, each in self._sets.items():
                found = evaluate(metrics, each.loader, each.plan, self._engine.link, limit_batches=limit)
                self.metrics.update({f"{name}/{metric}": value for metric, value in found.items()})
        return self.metrics

    def judge(self, position: Position) -> None:
        """Is this the best so far? Every rank has the same number, so all decide alike."""
        monitor = self._config.monitor or next(iter(self.metrics))
        if monitor not in self.metrics:
            raise UnknownMonitor(monitor, list(self.metrics))
        score = self.metrics[monitor]
        position.validated, position.score = position.num_steps, score
        sign = 1.0 if self._config.monitor_mode == "min" else -1.0
        if position.best is None or sign * score < sign * position.best:
            position.best, position.bad_validations = score, 0
        else:
            position.bad_validations += 1

    @property
    def is_empty(self) -> bool:
        return not self._sets

    def _check_monitor(self) -> None:
        """The set of `monitor` is known before the first step, its metric only after the first validation."""
        name, _, metric = (self._config.monitor or "").rpartition("/")
        if self._config.monitor and self._sets and name not in self._sets:
            raise UnknownMonitor(self._config.monitor, [f"{known}/{metric}" for known in self._sets])

    def _set(self, name: str, data: Any) -> _Set:
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise NotASet(name, f"is a {type(data).__name__}, of which nobody knows the length")
        if len(data) == 0:
            raise NotASet(name, "is empty")
        link = self._engine.link
        loader = Loader(
            data,
            collate=self._task.collate,
            seed=self._config.seed,
            device=link.device,
            workers=self._config.workers,
            local_size=link.world.local_size,
        )
        return _Set(loader, evaluation_plan(len(data), self._rule, self._task.lengths(data)))
