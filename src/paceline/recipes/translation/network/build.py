"""A network from its sizes."""

from __future__ import annotations

from paceline.recipes.translation.network.lstm import Lstm
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.network.transformer import Transformer


def build_network(shape: Shape, vocabulary: int) -> Transformer | Lstm:
    """Return a network with random weights, drawn from torch's generator."""
    return Transformer(shape, vocabulary) if shape.kind == "transformer" else Lstm(shape, vocabulary)
