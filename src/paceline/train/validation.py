"""Looking at the model: all validation sets, which of the results counts, and whether it is getting better."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError
from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule, Plan
from paceline.observe.callback import Samples
from paceline.train.engine import Engine
from paceline.train.evaluate import evaluate, evaluation_plan
from paceline.train.position import Position
from paceline.train.task import Task, overrides

NUM_SAMPLES = 5
"""Of each validation set, how many are shown."""


class NotASet(PacelineError):
    """A data set that cannot be cut into fixed batches."""

    hint = "give a data set with __len__ and __getitem__ and at least one sample, or leave it out of `val_data`"

    def __init__(self, what: str, why: str, hint: str | None = None) -> None:
        super().__init__(f"{what} {why}")
        self.what = what
        self.hint = self.hint if hint is None else hint


class UnknownMonitor(PacelineError):
    """The metric to watch is none of those that validation gives."""

    def __init__(self, monitor: str, known: list[str]) -> None:
        super().__init__(f"`monitor` is {monitor!r}, but validation gives {', '.join(known)}")
        nearest = difflib.get_close_matches(monitor, known, n=1, cutoff=0.0)[0]
        self.hint = f"did you mean `--monitor {nearest}`?"


@dataclass(frozen=True)
class FixedSet:
    """A data set cut into batches that do not depend on the number of ranks."""

    loader: Loader
    plan: Plan


def fixed_set(
    task: Task, engine: Engine, config: TrainConfig, grains: int, what: str, data: Any, *, in_order: bool = False
) -> FixedSet:
    """Batches of a training grain's size, or of `eval_batch`: by length where lengths are known, or as in the data.

    `what` names the data in messages.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise NotASet(what, f"is a {type(data).__name__}, of which nobody knows the length")
    if len(data) == 0:
        raise NotASet(what, "is empty")
    lengths = task.lengths(data)
    cost = (None if lengths is None else task.eval_cost) if config.batch_cost is None else config.batch_cost / grains
    rule = BatchRule(
        max_samples=config.eval_batch or max(1, config.max_samples // grains),
        max_cost=None if config.eval_batch else cost,
    )
    loader = Loader(
        data,
        collate=task.collate,
        seed=config.seed,
        device=engine.device,
        workers=config.workers,
        local_size=engine.link.world.local_size,
    )
    return FixedSet(loader, evaluation_plan(len(data), rule, lengths, in_order=in_order))


class Validation:
    """Every named validation set of a task (or those given), cut into fixed batches once and for all."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        config: TrainConfig,
        grains: int,
        sets: Mapping[str, Any] | None = None,
    ) -> None:
        self._task, self._engine, self._config = task, engine, config
        self.metrics: dict[str, float] = {}
        """Of the last time, as `set/metric`."""
        self.samples: Samples = {}
        """Of the last time, where the task shows some."""
        self.seconds = 0.0
        """What the last time took on this rank."""
        given = sets is not None
        if sets is None:
            sets = {} if config.mode == "train" else task.val_data()
            if not isinstance(sets, Mapping):
                kind = type(sets).__name__
                hint = 'a data set gets a name, which its metrics have, too: `return {"dev": data}`'
                raise NotASet("what `val_data` returned", f"is a {kind}, not {{name: data set}}", hint)
        self._sets = {
            name: fixed_set(task, engine, config, grains, f"validation set {name!r}", data)
            for name, data in sets.items()
        }
        if not given:
            self._check_monitor()

    def run(self) -> dict[str, float]:
        """Metrics of all sets, the same numbers on every rank; all ranks must call it."""

        def metrics(grain: Grain) -> Mapping[str, tuple[Any, Any]]:
            return self._task.metrics(self._engine.model, grain)

        began = time.perf_counter()
        self.metrics, self.samples = {}, {}
        if self.is_empty:
            return self.metrics
        shows = overrides(self._task, "samples")
        limit, seed = self._config.limit_batches, self._config.seed
        with self._engine.evaluating():
            for name, each in self._sets.items():
                found = evaluate(metrics, each.loader, each.plan, self._engine.link, limit_batches=limit, seed=seed)
                self.metrics.update({f"{name}/{metric}": value for metric, value in found.items()})
                if shows:
                    self.samples[name] = self._look(each)
        self.seconds = time.perf_counter() - began
        return self.metrics

    def _look(self, each: FixedSet) -> list[dict[str, str]]:
        """Some samples of a set, always the same: the first of the batch in the middle, which is of middle length."""
        link, step = self._engine.link, each.plan.num_steps // 2
        mine: list[dict[str, str]] = []
        if link.world.rank == step % link.world.size:
            for batch in each.loader.run(each.plan, range(step, step + 1)):
                for grain in batch.grains:
                    mine += [dict(sample) for sample in self._task.samples(self._engine.model, grain)]
        return [sample for everyone in link.gather_objects(mine[:NUM_SAMPLES]) for sample in everyone]

    def judge(self, position: Position) -> None:
        """Is this the best so far? Every rank has the same number, so all decide alike."""
        position.validated, position.score = position.num_steps, None
        monitor = self._config.monitor or f"{next(iter(self._sets))}/{self._task.monitor}"
        if monitor not in self.metrics:
            if self._config.monitor is None and self._config.patience is None:
                return  # no loss among the metrics, and nobody asked for a best
            raise UnknownMonitor(monitor, list(self.metrics))
        score = position.score = self.metrics[monitor]
        sign = 1.0 if self._config.monitor_mode == "min" else -1.0
        position.scores.append(sign * score)
        if math.isfinite(score) and (position.best is None or sign * score < sign * position.best):
            position.best, position.bad_validations = score, 0
        else:
            position.bad_validations += 1

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each set."""
        return {name: each.plan.num_samples for name, each in self._sets.items()}

    @property
    def is_empty(self) -> bool:
        return not self._sets

    def _check_monitor(self) -> None:
        """The set of `monitor` is known before the first step, its metric only after the first validation."""
        name, _, metric = (self._config.monitor or "").rpartition("/")
        if self._config.monitor and self._sets and name not in self._sets:
            raise UnknownMonitor(self._config.monitor, [f"{known}/{metric}" for known in self._sets])
