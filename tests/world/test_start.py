"""`start` on this machine; its decisions are tested with resources.py and discover/interfaces.py."""

from __future__ import annotations

import pytest
import torch

from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.resources import NoCudaDevice
from paceline.world.start import start
from tests.ranks import ranks

PLAIN = World(0, 0, 1, 1, 0, 1, "plain", None)


@ranks(2)
def test_threads_are_set_for_real(link: Link) -> None:
    assert link.threads == torch.get_num_threads() == 1


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NoCudaDevice):
        start(PLAIN, device="cuda")


@pytest.mark.gpu
def test_cuda_is_chosen_and_needs_no_group_alone() -> None:
    with start(PLAIN, device="auto", threads=1) as link:
        assert link.device == torch.device("cuda:0")
        tensor = torch.ones(2, device=link.device)
        link.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
