"""Any labelled data set as a stream of experiences: new classes, new tasks or new domains, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import Conflict
from paceline.core.units import counted
from paceline.recipes.continual.files import Labelled, Split

Scenario = Literal["class", "task", "domain"]
"""`class`: new classes; `task`: new classes, with the task given at test time; `domain`: new inputs."""


@dataclass(frozen=True)
class Experience:
    """One part of a stream. Data is made when it is asked for."""

    name: str
    classes: tuple[int, ...]
    """Values of its labels."""
    train: Callable[[], Labelled]
    test: Callable[[], Labelled]


def labelled(data: Any) -> Labelled:
    """Return a map-style data set of (example, label) as tensors; examples that are not tensors or arrays are
    refused."""
    if isinstance(data, Labelled):
        return data
    pairs = [data[number] for number in range(len(data))]
    x = torch.stack([torch.as_tensor(np.asarray(example), device="cpu") for example, _ in pairs])
    return Labelled(x, torch.tensor([int(label) for _, label in pairs], device="cpu"))


def class_incremental(split: Split, num_tasks: int, order: Sequence[int] | None = None) -> list[Experience]:
    """Return experiences that each bring new classes, in `order` (ascending if not given), as evenly as they can be
    shared."""
    train, test = (labelled(part) for part in split)
    classes = torch.unique(torch.cat([train.y, test.y])).tolist() if order is None else list(order)
    if num_tasks > len(classes):
        raise Conflict(
            f"{counted(num_tasks, 'task')} cannot share {counted(len(classes), 'class')}: each needs at least one",
            hint=f"set `--num-tasks` to {len(classes)} or less",
        )
    parts = [tuple(int(name) for name in part) for part in np.array_split(np.array(classes), num_tasks)]
    return [
        Experience(f"task{number + 1}", part, partial(_of_classes, train, part), partial(_of_classes, test, part))
        for number, part in enumerate(parts)
    ]


def domain_incremental(split: Split, views: Sequence[Callable[[Tensor], Tensor]]) -> list[Experience]:
    """Return experiences that each have all classes and all examples, seen through one of the `views` (batch in, batch
    out)."""
    train, test = (labelled(part) for part in split)
    classes = tuple(torch.unique(torch.cat([train.y, test.y])).tolist())
    return [
        Experience(f"task{number + 1}", classes, partial(_seen_as, train, view), partial(_seen_as, test, view))
        for number, view in enumerate(views)
    ]


def _of_classes(data: Labelled, classes: tuple[int, ...]) -> Labelled:
    return data.select(torch.isin(data.y, torch.tensor(classes, device="cpu")).nonzero().squeeze(1))


def _seen_as(data: Labelled, view: Callable[[Tensor], Tensor]) -> Labelled:
    return Labelled(view(data.x), data.y)
