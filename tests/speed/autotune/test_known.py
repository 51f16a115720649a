"""The shipped table of fast ways: complete, ordered, and silent about what was never measured."""

from __future__ import annotations

import pytest

from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.known import Kind, known_ways

KINDS: tuple[Kind, ...] = ("covered", "partly", "plain")


def test_hopper_takes_what_was_measured_there() -> None:
    found = known_ways((9, 0), "covered", can_graph=True)
    assert [way.name for way in found.ways] == ["-O2 + kernels + graphs", "-O2 + kernels", "-O2 + graphs", "-O2"]
    assert found.reason == "the fastest known on compute capability 9.0"
    assert found.notes == ()
    assert [way.name for way in known_ways((9, 0), "covered", can_graph=False).ways] == ["-O2 + kernels", "-O2"]
    assert [way.name for way in known_ways((9, 0), "plain", can_graph=True).ways] == ["-O2 + graphs", "-O2"]
    assert [way.name for way in known_ways((9, 0), "plain", can_graph=False).ways] == ["-O2"]


@pytest.mark.parametrize("generation", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0), None])
def test_kernels_are_not_taken_where_they_were_not_measured(generation: tuple[int, int] | None) -> None:
    for kind in KINDS:
        found = known_ways(generation, kind, can_graph=True)
        assert [way.name for way in found.ways] == ["-O2 + graphs", "-O2"]
        assert bool(found.notes) == (kind != "plain")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("can_graph", [True, False])
def test_the_last_resort_is_plain_and_nothing_compiles_unasked(kind: Kind, can_graph: bool) -> None:
    for generation in [(9, 0), (8, 0), None]:
        ways = known_ways(generation, kind, can_graph=can_graph).ways
        assert ways[-1] == Candidate(2)
        assert len(set(ways)) == len(ways)
        assert not any(way.is_compiled for way in ways)
        assert can_graph or not any(way.graphs for way in ways)
