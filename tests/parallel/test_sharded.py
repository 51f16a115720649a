"""Which modules are sharded, what cannot be, and pieces against torch's own cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.parallel.cut import MIN_BLOCK, CannotShard, Cut, blocks, check
from paceline.parallel.sharded import shard
from paceline.world.link import Link
from tests.ranks import ranks

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


@ranks(2, 4)
def test_pieces_are_those_of_torch_and_join_to_the_whole(link: Link) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))  # 5 rows and 1 row: uneven, and empty on some ranks
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = sgd(model)
    shards = shard(model, optimizer, link, Cut(("0",)))
    mesh = next(iter(shards._parameters.values())).device_mesh
    whole = {**before, "count": torch.tensor(3.0), "buffer": torch.arange(6.0)}
    pieces = shards.pieces(whole)
    for name, tensor in before.items():
        expected = distribute_tensor(tensor, mesh, [Shard(0)]).to_local()
        assert torch.equal(pieces[name], expected)
        assert torch.equal(shards.tensors[name], expected)
    assert torch.equal(pieces["count"], whole["count"])
    assert torch.equal(pieces["buffer"], whole["buffer"])
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    assert [tensor.data_ptr() for tensor in held] == [tensor.data_ptr() for tensor in shards.tensors.values()]
    joined = shards.whole(pieces)
    if link.is_first:
        assert joined.keys() == whole.keys()
        assert all(torch.equal(joined[name], tensor) for name, tensor in whole.items())
    else:
        assert joined.keys() == {"count", "buffer"}
