"""Pieces of sharded parameters against torch's own sharding."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.parallel.sharded.blocks import Sharding
from paceline.parallel.sharded.fsdp import shard
from paceline.world.link import Link
from tests.ranks import ranks


@ranks(2, 4)
def test_pieces_are_those_of_torch_and_join_to_the_whole(link: Link) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))  # 5 rows and 1 row: uneven, and empty on some ranks
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards = shard(model, optimizer, link, Sharding(("0",)))
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
