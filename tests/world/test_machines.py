"""Ranks are grouped by machine, however a launcher has dealt them out."""

from __future__ import annotations

import pytest

from paceline.world.machines import UnevenMachines, group_ranks


def test_ranks_of_each_machine() -> None:
    assert group_ranks([0, 0, 1, 1]) == [[0, 1], [2, 3]]
    assert group_ranks([0, 1, 0, 1]) == [[0, 2], [1, 3]], "dealt out in turns"
    assert group_ranks([3, 3, 0, 0]) == [[0, 1], [2, 3]], "the machine of rank 0 comes first"
    assert group_ranks([0]) == [[0]]


def test_machines_with_different_numbers_of_ranks() -> None:
    with pytest.raises(UnevenMachines, match=r"different numbers of ranks: 2, 1"):
        group_ranks([0, 0, 1])
