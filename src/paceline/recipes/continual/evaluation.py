"""Accuracy on the tasks of a stream: as validation metrics, and measured between tasks for the matrices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule
from paceline.recipes.continual.matrix import Results
from paceline.recipes.continual.plot import heat_map
from paceline.recipes.continual.report import RESULTS
from paceline.recipes.continual.streams import Stream
from paceline.train.evaluation import evaluate, evaluation_plan
from paceline.train.task import Sums
from paceline.world.link import Link

PICTURE = "matrix-{}.svg"
"""In the run folder."""


class Evaluation:
    """Class-IL (choose among all classes so far) and task-IL (among those of the example's task) accuracy."""

    def __init__(
        self, stream: Stream, batch: int, link: Link, evaluating: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._stream, self._batch, self._link, self._evaluating = stream, batch, link, evaluating
        self._together = stream.together.to(link.device)
        self.results = Results(len(stream.experiences))

    def metrics(self, model: nn.Module, grain: Grain, last_task: int) -> Mapping[str, Sums]:
        """Return both accuracies of one batch after the tasks up to `last_task`, as (sum, weight)."""
        output, y = model(self._stream.view(grain.x, False)), grain.y
        seen = self._stream.seen[last_task].to(output.device)
        # A class that has not come yet (forward transfer) is judged among all classes.
        hidden = seen[y].unsqueeze(1) & ~seen
        right = output.masked_fill(hidden, -torch.inf).argmax(1) == y
        in_task = output.masked_fill(~self._together[y], -torch.inf).argmax(1) == y
        return {"class_il": (right.sum(), len(grain)), "task_il": (in_task.sum(), len(grain))}

    def measure_untrained(self, model: nn.Module, last_task: int) -> None:
        """Measure a network that has learned nothing, once: forward transfer is relative to it."""
        if np.isnan(self.results.untrained).all():
            every = range(len(self._stream.experiences))
            self.results.untrained[:] = self._measure(model, every, last_task)

    def measure_after(self, model: nn.Module, task: int) -> str:
        """Fill in the row of a task that has ended; return it as a line."""
        results, experiences = self.results, self._stream.experiences
        class_il, task_il = self._measure(model, range(min(task + 2, len(experiences))), task)
        results.class_il[task, : len(class_il)] = class_il
        results.task_il[task, : len(task_il)] = task_il
        done = ", ".join(f"{100 * value:.1f}" for value in class_il[: task + 1])
        return f"after {experiences[task].name}: class-IL {results.summary()['class_il']:.2f} % ({done})"

    def _measure(self, model: nn.Module, tasks: Sequence[int], last_task: int) -> tuple[list[float], list[float]]:
        """Return class-IL and task-IL accuracy on these tasks, the same numbers on every rank."""
        metrics = []
        with self._evaluating():
            for task in tasks:
                data = self._stream.experiences[task].test()
                loader = Loader(TensorDataset(data.x, data.y), device=self._link.device, workers=0)
                plan = evaluation_plan(len(data), BatchRule(self._batch))
                metrics.append(evaluate(partial(self.metrics, model, last_task=last_task), loader, plan, self._link))
                loader.close()
        return [each["class_il"] for each in metrics], [each["task_il"] for each in metrics]

    def write(self, folder: Path, title: str) -> None:
        """Write the matrices as numbers and as pictures."""
        names = [experience.name for experience in self._stream.experiences]
        for name, matrix in (("class-IL", self.results.class_il), ("task-IL", self.results.task_il)):
            picture = heat_map(matrix, names, f"{title}: {name} accuracy, %")
            (folder / PICTURE.format(name.lower())).write_text(picture, encoding="utf-8")
        (folder / RESULTS).write_text(json.dumps({"tasks": names, **self.results.as_json()}), encoding="utf-8")

    def state(self) -> dict[str, Tensor]:
        results = self.results
        return {
            "class_il": torch.from_numpy(results.class_il.copy()),
            "task_il": torch.from_numpy(results.task_il.copy()),
            "untrained": torch.from_numpy(results.untrained.copy()),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if state:  # not that of a checkpoint without one
            results = self.results
            results.class_il = state["class_il"].numpy().copy()
            results.task_il = state["task_il"].numpy().copy()
            results.untrained = state["untrained"].numpy().copy()
