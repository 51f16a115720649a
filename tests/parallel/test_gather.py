"""Tensors that differ from rank to rank arrive as they are."""

from __future__ import annotations

import torch

from paceline.parallel.gather import gather_tensors
from paceline.world.link import Link
from tests.ranks import ranks


def own(rank: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    found = {
        "flags": torch.tensor([True, False, rank > 0]),  # 3 bytes: what follows is not aligned
        "weights": torch.randn(rank + 1, 4, generator=random).T,
        "half": torch.randn((), generator=random).half(),
        "empty": torch.zeros(0, 3),
        "count": torch.tensor(rank * 2**40),
    }
    return {} if rank == 2 else found


@ranks(1, 2, 4)
def test_the_first_rank_has_them_all(link: Link) -> None:
    found = gather_tensors(link, own(link.world.rank))
    assert len(found) == (link.world.size if link.is_first else 0)
    for rank, tensors in enumerate(found):
        expected = own(rank)
        assert list(tensors) == list(expected)
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name])
