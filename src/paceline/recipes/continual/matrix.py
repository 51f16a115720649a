"""Accuracy matrix: accuracy on each task after each task, and the numbers that are read from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
"""R[t, i]: accuracy on task i after task t, from 0 to 1; nan where it was not measured."""


def average(matrix: Matrix, after: int) -> float:
    """Return the mean accuracy over the tasks so far."""
    return float(matrix[after, : after + 1].mean())


def forgetting(matrix: Matrix) -> float:
    """Return the mean loss from the best that was ever known of a task to what is left at the end (Chaudhry et al.
    2018)."""
    last = len(matrix) - 1
    return _mean([np.nanmax(matrix[task:last, task]) - matrix[last, task] for task in range(last)])


def backward_transfer(matrix: Matrix) -> float:
    """Return the mean change from when a task was learned to the end (Lopez-Paz & Ranzato 2017)."""
    last = len(matrix) - 1
    return _mean([matrix[last, task] - matrix[task, task] for task in range(last)])


def forward_transfer(matrix: Matrix, untrained: Matrix) -> float:
    """Return the mean gain on a task before it is learned, over a network that has learned nothing."""
    return _mean([matrix[task - 1, task] - untrained[task] for task in range(1, len(matrix))])


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


@dataclass
class Results:
    """The matrices of a run, class-IL and task-IL; rows are filled as tasks end."""

    num_tasks: int
    class_il: Matrix = field(init=False)
    task_il: Matrix = field(init=False)
    untrained: NDArray[np.float64] = field(init=False)
    """(2, tasks): class-IL and task-IL before the first step."""

    def __post_init__(self) -> None:
        self.class_il = np.full((self.num_tasks, self.num_tasks), np.nan)
        self.task_il = np.full((self.num_tasks, self.num_tasks), np.nan)
        self.untrained = np.full((2, self.num_tasks), np.nan)

    @property
    def num_done(self) -> int:
        """Tasks up to the last one that was measured."""
        done = np.flatnonzero(~np.isnan(self.class_il).all(1))
        return int(done[-1]) + 1 if len(done) else 0

    def summary(self) -> dict[str, float]:
        """Return the numbers as of now, in percent."""
        done = self.num_done
        if done == 0:
            return {}
        found = {}
        for name, matrix, untrained in (
            ("class_il", self.class_il, self.untrained[0]),
            ("task_il", self.task_il, self.untrained[1]),
        ):
            part = matrix[:done, :done]
            found[name] = 100 * average(part, done - 1)
            if done > 1 and not np.isnan(np.diag(part)).any():
                found[f"{name}_forgetting"] = 100 * forgetting(part)
                found[f"{name}_backward"] = 100 * backward_transfer(part)
                found[f"{name}_forward"] = 100 * forward_transfer(part, untrained)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the numbers and the matrices, for a file."""
        matrices = {"class_il_matrix": self.class_il, "task_il_matrix": self.task_il}
        plain = {
            name: [[None if np.isnan(value) else float(value) for value in row] for row in matrix]
            for name, matrix in matrices.items()
        }
        return {**self.summary(), **plain}
