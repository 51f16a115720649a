from __future__ import annotations

import pytest
import torch

from paceline.train.checkpoint.memory import layout_of
from paceline.train.checkpoint.mirror import Holding, MirroredState, choose, partner_shift
from paceline.train.checkpoint.pieces import shard_name
from paceline.world.link import Link
from tests.ranks import ranks


@pytest.mark.parametrize(
    ("hosts", "shift"), [("aa", 1), ("aaaa", 1), ("aabb", 2), ("abcd", 1), ("aaab", 3), ("aabbcc", 2)]
)
def test_pieces_are_kept_on_another_machine(hosts: str, shift: int) -> None:
    assert partner_shift(hosts) == shift


def test_newest_copy_that_is_complete() -> None:
    ring = [[Holding(8, 4, (rank, (rank - 1) % 4))] for rank in range(4)]
    assert choose(ring) == (8, {0: 0, 3: 0, 1: 1, 2: 2})
    assert choose([ring[0], ring[2], ring[3]]) == (8, {0: 0, 3: 0, 2: 1, 1: 1})  # rank 1 is gone, rank 2 has its pieces
    assert choose([ring[0], ring[3]]) is None  # rank 2 had the pieces of rank 1, and is gone too
    assert choose([[], []]) is None


def test_copy_that_not_all_have_taken_does_not_count() -> None:
    both = [Holding(9, 3, (0, 2)), Holding(8, 3, (0, 2))]
    late = [Holding(8, 3, (1, 0))]
    assert choose([both, late]) == (8, {0: 0, 2: 0, 1: 1})


def share(link: Link, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Rows of this rank of a matrix, and on the first rank what is no piece."""
    rank, size = link.world.rank, link.world.size
    rows = torch.arange(12.0).view(6, 2)[rank * 6 // size : (rank + 1) * 6 // size] + step
    first = {"scale": {"value": torch.tensor([float(step)])}} if rank == 0 else {}
    return {shard_name("model", rank, size): {"weight": rows}, **first}


@ranks(1, 2, 3)
def test_what_one_rank_has_forgotten_others_have(link: Link) -> None:
    mirrored = MirroredState()
    for step in (1, 2, 3):
        mirrored.take(link, step, share(link, step), {"position": {"step": step}})
        assert mirrored.step == step
    if link.world.rank == 1:
        mirrored.forget()  # as its replacement, which comes with nothing
    mirrored.share(link, (0,))
    copy = mirrored.checkpoint()
    assert copy is not None
    assert (copy.step, copy.state) == (3, {"position": {"step": 3}})
    assert torch.equal(copy.parts["model"]["weight"], torch.arange(12.0).view(6, 2) + 3)
    assert copy.parts["scale"]["value"].tolist() == [3.0]
    mirrored.take(link, 4, share(link, 4), {})  # the next one, of the ranks that there are now
    mirrored.share(link, (0,))
    again = mirrored.checkpoint()
    assert again is not None
    assert torch.equal(again.parts["model"]["weight"], torch.arange(12.0).view(6, 2) + 4)


@ranks(2)
def test_nothing_is_left_where_both_are_gone(link: Link) -> None:
    mirrored = MirroredState()
    mirrored.take(link, 1, share(link, 1), {})
    mirrored.forget()
    mirrored.share(link, (0,))
    assert mirrored.step is None
    assert mirrored.checkpoint() is None


def test_layout_says_what_room_is_needed() -> None:
    assert layout_of({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}) == {"a": ((2, 3), "bfloat16")}
