"""Networks: two hidden layers of 100 for small pictures, ResNet-18 for 32 x 32, or a class in a user's file.

A network may have `features(x)`, what its last layer sees; herding then goes by that, else by its outputs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import PacelineError, TaskContract
from paceline.core.user_file import class_from_file


class MLP(nn.Module):
    """Two hidden layers of 100, as in Mammoth's experiments on MNIST: Xavier weights, no bias at the start."""

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(math.prod(shape), 100)
        self.second = nn.Linear(100, 100)
        self.head = nn.Linear(100, num_classes)
        for layer in (self.first, self.second, self.head):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x.flatten(1)))))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class ResNet18(nn.Module):
    """He et al. 2016, for 32 x 32: a 3 x 3 stem and no pooling before the blocks. 11.2 million weights."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape[0], width, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for number in range(4):
            wide = width * 2**number
            blocks += [Block(channels, wide, 1 if number == 0 else 2), Block(wide, wide, 1)]
            channels = wide
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks(F.relu(self.stem_norm(self.stem(x)))).mean((2, 3))
        return found

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores


BACKBONES: dict[str, type[nn.Module]] = {"mlp": MLP, "resnet18": ResNet18}


def build(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the network of this name, or `file.py:Model`, for examples of this shape."""
    if name in BACKBONES:
        return BACKBONES[name](shape, num_classes)
    model = class_from_file("network", name, nn.Module)
    try:
        made: nn.Module = model(shape, num_classes)
    except PacelineError:
        raise
    except Exception as error:
        raise TaskContract(
            f"{name} cannot be made: {type(error).__name__}: {error}",
            hint="it is made as Model(shape, num_classes), e.g. Model((3, 32, 32), 10)",
        ) from error
    return made


def features_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the features that herding compares."""
    own = getattr(model, "features", None)
    if not callable(own):
        found: Tensor = model(x)
        return found.flatten(1)
    # The call that casts inputs to the network's dtype is the network's own.
    dtype = next(model.parameters()).dtype
    seen: Tensor = own(x.to(dtype) if x.is_floating_point() and dtype == torch.float64 else x)
    return seen.flatten(1)
