"""A thin residual net, as a user's file would have it."""

from __future__ import annotations

from paceline.recipes.continual.backbones import ResNet18


class Narrow(ResNet18):
    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(shape, num_classes, width=4)
