"""Embeddings of tokens."""

from __future__ import annotations

from torch import nn


def make_embedding(vocabulary: int, width: int) -> nn.Embedding:
    """Return an embedding whose rows have a length of 1: scaled by the root of the width, their numbers are near 1."""
    embedding = nn.Embedding(vocabulary, width)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    return embedding
