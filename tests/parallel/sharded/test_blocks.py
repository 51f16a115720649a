"""Blocks of sharded models, and errors for what cannot be sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.parallel.sharded.blocks import MIN_BLOCK, CannotShard, blocks, check

LARGE = 256  # a square matrix of that width is a block of its own
assert LARGE * LARGE >= MIN_BLOCK


def layer(width: int = LARGE) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, LARGE)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.small = nn.Sequential(nn.Linear(LARGE, 2), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_large_children_of_lists_are_blocks() -> None:
    assert blocks(Encoder(5)) == [f"layers.{number}" for number in range(5)]


def test_a_block_that_is_most_of_the_model_is_looked_into() -> None:
    model = nn.Sequential(Encoder(5), nn.Linear(2, LARGE))
    assert blocks(model) == ["0", *(f"0.layers.{number}" for number in range(5))]


def test_small_models_are_one_block() -> None:
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_patterns_choose_and_lists_stand_for_their_children() -> None:
    model = Encoder(2)
    assert blocks(model, ["layers"]) == ["layers.0", "layers.1"]
    assert blocks(model, ["first", "layers.1"]) == ["first", "layers.1"]
    assert blocks(model, ["layers.*"]) == ["layers.0", "layers.0.0", "layers.1", "layers.1.0"]  # ReLU has nothing
    with pytest.raises(CannotShard, match=r"'layer\.\*' matches no module") as caught:
        blocks(model, ["layer.*"])
    assert "layers" in caught.value.hint


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))


def test_what_cannot_be_sharded_is_named() -> None:
    scalar = Scalar()
    with pytest.raises(CannotShard, match="'temperature' is a single number"):
        check(scalar, sgd(scalar), [])
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(CannotShard, match=r"torch\.float16, torch\.float32"):
        check(mixed, sgd(mixed), [])
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    check(tied, sgd(tied), [])
    with pytest.raises(CannotShard, match=r"'0\.weight' and '1\.weight' are one parameter in two blocks"):
        check(tied, sgd(tied), ["1"])
    stepped = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(stepped.parameters())
    stepped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(CannotShard, match="has made steps already"):
        check(stepped, optimizer, [])
    with pytest.raises(CannotShard, match="LBFGS may need whole tensors"):
        check(scalar, torch.optim.LBFGS(scalar.parameters()), [])
