from __future__ import annotations

import pytest
import torch

from paceline.train.checkpoint.memory import COST, LONGEST_S, MemoryState, same_on_all, steps_between
from paceline.world.link import Link
from tests.ranks import ranks

PARTS = {
    "model": {"weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(7), "none": torch.zeros(0, 2)},
    "task": {"seen": torch.tensor([True, False])},
}


def test_copy_is_one_of_its_moment() -> None:
    memory, weight = MemoryState(), torch.ones(3)
    assert memory.checkpoint() is None
    memory.take(4, {"model": {"weight": weight}, "task": {"seen": weight}}, {"position": {"scores": [1.0]}})
    weight.add_(1.0)
    copy = memory.checkpoint()
    assert copy is not None
    assert copy.step == 4
    assert copy.parts["model"]["weight"].tolist() == [1.0, 1.0, 1.0]
    copy.parts["task"]["seen"].add_(5.0)
    copy.state["position"]["scores"].append(2.0)
    again = memory.checkpoint()
    assert again is not None
    assert again.parts["task"]["seen"].tolist() == [1.0, 1.0, 1.0]
    assert again.state == {"position": {"scores": [1.0]}}


@pytest.mark.parametrize(("copy_s", "step_s"), [(1e-3, 5e-3), (0.06, 0.02), (0.3, 0.5), (0.0, 0.1), (5.0, 10.0)])
def test_copies_cost_their_share_at_most(copy_s: float, step_s: float) -> None:
    steps = steps_between(copy_s, step_s)
    assert steps >= 1
    assert steps * step_s <= max(LONGEST_S + step_s, step_s)
    assert copy_s <= COST * steps * step_s * (1 + 1e-9) or (steps + 1) * step_s > LONGEST_S


@ranks(2, 3)
def test_all_ranks_get_the_copy_of_those_that_have_it(link: Link) -> None:
    memory = MemoryState()
    if link.world.rank == 1:
        memory.take(12, PARTS, {"position": {"epoch": 3, "scores": [0.5]}})
    elif link.world.rank == 0:
        memory.take(3, {"model": {"other": torch.ones(1)}}, {})  # older: not the one that is shared
    memory.share(link, (1,))
    copy = memory.checkpoint()
    assert copy is not None
    assert copy.step == 12
    assert copy.state == {"position": {"epoch": 3, "scores": [0.5]}}
    assert copy.parts.keys() == PARTS.keys()
    for part, tensors in PARTS.items():
        for name, tensor in tensors.items():
            assert copy.parts[part][name].dtype == tensor.dtype
            assert torch.equal(copy.parts[part][name], tensor)


@ranks(2)
def test_what_all_have_is_not_sent(link: Link) -> None:
    memory = MemoryState()
    memory.take(link.world.rank, {"model": {"weight": torch.tensor([float(link.world.rank)])}}, {})
    memory.share(link, (0, 1))
    assert memory.step == link.world.rank


@ranks(1, 2)
def test_state_that_only_the_first_rank_has_comes_to_all(link: Link) -> None:
    own = PARTS["model"] if link.is_first else {}
    got = same_on_all(link, own)
    assert got.keys() == PARTS["model"].keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in PARTS["model"].items())
