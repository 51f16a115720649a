"""Streams by name: data, how it is cut, default network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.core.keys import key
from paceline.recipes.continual import files, pixels
from paceline.recipes.continual.files import Split
from paceline.recipes.continual.incremental import Experience, Scenario, class_incremental, domain_incremental

NUM_CIFAR = 50_000
CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615)


@dataclass(frozen=True)
class Kind:
    """Data, scenario and defaults of a stream."""

    read: Callable[[Path], Split]
    num_tasks: int
    scenario: Scenario
    backbone: str
    views: Callable[[int, int], list[partial[Tensor]]] | None = None
    """Of a domain stream: (number of tasks, seed) -> a view per task."""
    augments: bool = False
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()


STREAMS: dict[str, Kind] = {
    "seq-digits": Kind(lambda root: files.digits(), 5, "class", "mlp"),
    "seq-mnist": Kind(files.mnist, 5, "class", "mlp"),
    "perm-mnist": Kind(files.mnist, 20, "domain", "mlp", pixels.permutations),
    "rot-mnist": Kind(files.mnist, 20, "domain", "mlp", pixels.rotations),
    "seq-cifar10": Kind(
        partial(files.cifar, "cifar10"), 5, "class", "resnet18", None, True, CIFAR_MEAN, CIFAR_DEVIATION
    ),
    "seq-cifar100": Kind(
        partial(files.cifar, "cifar100"), 10, "class", "resnet18", None, True, CIFAR_MEAN, CIFAR_DEVIATION
    ),
}


class Stream:
    """A sequence of experiences over one set of classes."""

    def __init__(self, kind: Kind, experiences: list[Experience], scenario: Scenario, example: Tensor) -> None:
        self.kind, self.experiences, self.scenario = kind, experiences, scenario
        self.shape, self.dtype = tuple(example.shape), example.dtype
        self.note = ""
        """Remark on the data for the user."""
        self.num_classes = 1 + max(max(experience.classes) for experience in experiences)
        task_of = torch.zeros(self.num_classes, dtype=torch.int64, device="cpu")
        masks = torch.zeros(len(experiences), self.num_classes, dtype=torch.bool, device="cpu")
        for number, experience in enumerate(experiences):
            masks[number, list(experience.classes)] = True
            if scenario != "domain":
                task_of[list(experience.classes)] = number
        self.together = masks[task_of]
        """(classes, classes): which classes are of the same task."""
        self.seen = masks.cumsum(0) > 0
        """(tasks, classes): which classes have come by the end of each task."""

    def view(self, x: Tensor, augment: bool) -> Tensor:
        """Return stored examples as the network takes them."""
        if augment and self.kind.augments:
            x = pixels.crop_and_flip(x)
        return pixels.scale(x, self.kind.mean, self.kind.deviation)


def build(
    name: str, root: Path, *, num_tasks: int | None, scenario: Scenario | None, permute_classes: bool, seed: int
) -> Stream:
    """Return the stream of this name, from the files under `root`."""
    kind = STREAMS[name]
    split = kind.read(root)
    number = num_tasks or kind.num_tasks
    example = split[0].x[0]
    if kind.views is not None:
        return Stream(kind, domain_incremental(split, kind.views(number, seed)), "domain", example)
    order = None
    if permute_classes:
        num_classes = 1 + int(split[0].y.max())
        order = np.random.Generator(np.random.Philox(key(seed, 0x636C))).permutation(num_classes).tolist()
    stream = Stream(kind, class_incremental(split, number, order), scenario or kind.scenario, example)
    if "cifar" in name and len(split[0]) != NUM_CIFAR:
        stream.note = (
            f"{name} from a subset of {len(split[0])} of {NUM_CIFAR} pictures: not comparable with published results"
        )
    return stream
