"""Parallel environments of Grid Engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import Conflict
from paceline.world.launch.schedulers.grid_engine import choose_environment
from tests.world.launch.schedulers.test_script import SMALLEST

RULES = {"mpi": "$round_robin", "orte": "$fill_up", "many": "$pe_slots", "smp": "$pe_slots", "eight": "8"}


def test_one_machine_of_grid_engine_is_one_host() -> None:
    """On ce01e4b always `mpi`, whose slots are wherever some are free."""
    one, two = replace(SMALLEST, procs_per_node=8), replace(SMALLEST, nodes=2, procs_per_node=8)
    assert choose_environment(None, RULES, one) == "smp"
    assert choose_environment(None, {"mpi": "$fill_up", "eight": "8"}, one) == "eight"
    assert choose_environment("many", RULES, one) == "many"
    assert choose_environment(None, None, one) == "smp"
    assert choose_environment("mine", None, one) == "mine"
    assert choose_environment("elsewhere", RULES, one) == "elsewhere"
    assert choose_environment(None, RULES, two) == "mpi"
    assert choose_environment("orte", RULES, two) == "orte"
    assert choose_environment("mpi", RULES, SMALLEST) == "mpi"
    with pytest.raises(Conflict, match=r"mpi \(allocation rule \$round_robin\) does not promise 8 slots") as e:
        choose_environment("mpi", RULES, one)
    assert e.value.hint == "type `--parallel-environment smp`"
    with pytest.raises(Conflict, match="no parallel environment here promises 8 slots") as e:
        choose_environment(None, {"mpi": "$fill_up"}, one)
    assert "available: mpi ($fill_up)" in e.value.hint
