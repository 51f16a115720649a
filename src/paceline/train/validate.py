"""Validation sets of a task, evaluated while it is trained: see `evaluation.py`.

`judge` decides which result counts and if it is the best so far.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError
from paceline.data.dataset import fingerprint
from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule, Plan
from paceline.data.torch_loader import take_out
from paceline.observe.records import Analysis, Samples
from paceline.train.evaluation import NotASet, check_set, evaluate, evaluation_plan
from paceline.train.position import Position
from paceline.train.stepper import Stepper
from paceline.train.task import Reports, ShowsSamples, Task, lengths_of, val_data_of
from paceline.world.consistency import check_same

NUM_SAMPLES = 5
"""Samples of each validation set that are shown."""


class SetsWithoutNames(NotASet):
    """A `val_data` that returns something else than data sets by name."""

    hint = 'a data set gets a name, which its metrics have, too: `return {{"dev": data}}`'


_MOST_NAMES = 12
"""Metrics that a message names; one per class may be hundreds."""


class UnknownMonitor(PacelineError):
    """A metric to monitor that validation does not give."""

    monitor: str
    known: list[str]
    sentence = "`monitor` is {monitor!r}, but validation gives {names}"
    hint = "did you mean `--monitor {nearest}`?"

    @property
    def names(self) -> str:
        more = len(self.known) - _MOST_NAMES
        return ", ".join(self.known[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")

    @property
    def nearest(self) -> str:
        return difflib.get_close_matches(self.monitor, self.known, n=1, cutoff=0.0)[0]


# -- fixed batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedSet:
    """A data set cut into batches that do not depend on the number of ranks."""

    data: Any
    lengths: NDArray[Any] | None
    loader: Loader
    plan: Plan


def fixed_set(
    task: Task, stepper: Stepper, config: TrainConfig, grains: int, what: str, data: Any, *, in_order: bool = False
) -> FixedSet:
    """Cut a data set into batches of a training grain's size, or of `eval_batch`.

    Batches are by length where lengths are known, else (and with `in_order`) as in the data. `what` names the data in
    messages.
    """
    data, loaders_collate = take_out(data)
    check_set(data, what)
    lengths = lengths_of(task, data)
    cost = (None if lengths is None else task.eval_cost) if config.batch_cost is None else config.batch_cost / grains
    rule = BatchRule(
        max_samples=config.eval_batch or max(1, config.max_samples // grains),
        max_cost=None if config.eval_batch else cost,
    )
    loader = Loader(
        data,
        collate=task.collate or loaders_collate,
        seed=config.seed,
        device=stepper.device,
        workers=config.workers,
        local_size=stepper.link.world.local_size,
    )
    return FixedSet(data, lengths, loader, evaluation_plan(len(data), rule, lengths, in_order=in_order))


# -- all sets of a task ------------------------------------------------------------------------------------------------


class Validation:
    """All validation sets of a task, cut into fixed batches once."""

    def __init__(
        self,
        task: Task,
        stepper: Stepper,
        config: TrainConfig,
        grains: int,
        sets: Mapping[str, Any] | None = None,
    ) -> None:
        """`sets` replace the task's own."""
        self._task, self._stepper, self._config = task, stepper, config
        self.metrics: dict[str, float] = {}
        """Result of the last run, as `set/metric`."""
        self.samples: Samples = {}
        """Samples of the last run, where the task shows some."""
        self.analysis: Analysis = {}
        """Numbers of the last run beside metrics, by set, where the task has some."""
        self.seconds = 0.0
        """Duration of the last run on this rank."""
        named_sets = self._sets_of_task() if sets is None else sets
        self._sets = {
            name: fixed_set(task, stepper, config, grains, f"validation set {name!r}", data)
            for name, data in named_sets.items()
        }
        self._check_ranks()
        if sets is None:
            self._check_monitor()

    def run(self) -> dict[str, float]:
        """Return the metrics of all sets, the same numbers on every rank; all ranks must call it."""

        def metrics(grain: Grain) -> Mapping[str, Any]:
            return self._task.metrics(self._stepper.model, grain)

        began = time.perf_counter()
        self.metrics, self.samples, self.analysis = {}, {}, {}
        if self.is_empty:
            return self.metrics
        shows = self._task if isinstance(self._task, ShowsSamples) else None
        limit, seed = self._config.limit_batches, self._config.seed
        with self._stepper.evaluating():
            for name, each in self._sets.items():
                values = evaluate(metrics, each.loader, each.plan, self._stepper.link, limit_batches=limit, seed=seed)
                self.metrics.update({f"{name}/{metric}": value for metric, value in values.items()})
                analysis = self._task.analysis(name, each.data) if isinstance(self._task, Reports) else {}
                if analysis:
                    self.analysis[name] = dict(analysis)
                if shows is not None:
                    self.samples[name] = self._read_samples(shows, each)
        self.seconds = time.perf_counter() - began
        return self.metrics

    def close(self) -> None:
        """Stop the workers that read the sets; another `run` starts them anew."""
        for each in self._sets.values():
            each.loader.close()

    def judge(self, position: Position, *, is_due: bool = True) -> Position:
        """Return the position with the monitored score. Every rank has the same number, so all decide alike.

        A validation that no interval asked for (`is_due` False) decides nothing: neither patience nor the learning rate
        of a run that is given more epochs may depend on where it ended before.
        """
        position = replace(position, validated=position.num_steps, score=None)
        monitor = self._config.monitor or f"{next(iter(self._sets))}/{self._task.monitor}"
        if monitor not in self.metrics:
            if self._config.monitor is None and self._config.patience is None:
                return position  # no loss among the metrics, and no setting asks for a best
            raise UnknownMonitor(monitor, list(self.metrics))
        score = self.metrics[monitor]
        position = replace(position, score=score)
        if not is_due:
            return position
        sign = 1.0 if self._config.monitor_mode == "min" else -1.0
        position = replace(position, scores=(*position.scores, sign * score))
        if math.isfinite(score) and (position.best is None or sign * score < sign * position.best):
            return replace(position, best=score, bad_validations=0)
        return replace(position, bad_validations=position.bad_validations + 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each set."""
        return {name: each.plan.num_samples for name, each in self._sets.items()}

    @property
    def is_empty(self) -> bool:
        return not self._sets

    def _sets_of_task(self) -> Mapping[str, Any]:
        sets = val_data_of(self._task) if self._config.validation else {}
        if not isinstance(sets, Mapping):
            kind = type(sets).__name__
            raise SetsWithoutNames("what `val_data` returned", f"is a {kind}, not {{name: data set}}")
        return sets

    def _check_ranks(self) -> None:
        """Check that all ranks have the same sets: each of their batches runs on one rank."""
        link = self._stepper.link
        facts: dict[str, Any] = {"list of validation sets": sorted(self._sets)}
        for name, each in self._sets.items() if link.has_group else ():
            facts[f"number of samples of validation set {name!r}"] = len(each.data)
            facts[f"digest of validation set {name!r}"] = fingerprint(each.data, each.lengths, None)
        check_same(link, facts)

    def _check_monitor(self) -> None:
        """Check the set that `monitor` names before the first step; its metric is known after the first validation."""
        name, _, metric = (self._config.monitor or "").rpartition("/")
        if self._config.monitor and self._sets and name not in self._sets:
            raise UnknownMonitor(self._config.monitor, [f"{known}/{metric}" for known in self._sets])

    def _read_samples(self, task: ShowsSamples, each: FixedSet) -> list[dict[str, str]]:
        """Return some samples of a set, always the same: the first of the middle batch, which is of middle length."""
        link, step = self._stepper.link, each.plan.num_steps // 2
        samples: list[dict[str, str]] = []
        if link.world.rank == step % link.world.size:
            for batch in each.loader.run(each.plan, range(step, step + 1)):
                for grain in batch.grains:
                    samples += [dict(sample) for sample in task.samples(self._stepper.model, grain)]
        return [sample for everyone in link.gather_objects(samples[:NUM_SAMPLES]) for sample in everyone]
