"""The fastest way wins, the hopeless are left early, and what was found is found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.errors import Failed
from paceline.speed.autotune.candidates import Candidate, candidates
from paceline.speed.autotune.choice import (
    CannotRun,
    Choice,
    choose,
    finalists,
)

THREE = [Candidate(2), Candidate(1), Candidate(0)]
ALL = candidates([0, 1, 2, 3], has_kernels=True, can_graph=True, leaves_some=True)


def clocks(
    seconds: dict[str, float], later: dict[str, float] | None = None, asked: list[str] | None = None
) -> tuple[Any, Any]:
    """What is measured of each way one after the other, and what in turns (the same, unless said otherwise)."""

    def measure(way: Candidate, limit_s: float) -> float:
        if asked is not None:
            asked.append(way.name)
        if way.name not in seconds:
            raise CannotRun("no such thing")
        return seconds[way.name]

    def in_turns(ways: Sequence[Candidate]) -> dict[Candidate, float]:
        return {way: (seconds | (later or {}))[way.name] for way in ways}

    return measure, in_turns


def test_candidates() -> None:
    names = [way.name for way in ALL]
    assert names[:2] == ["-O2 + kernels + graphs", "-O2 + kernels"]
    assert set(names) == {
        *(f"-O{level}" for level in range(4)),
        *(f"-O{level} + graphs" for level in (2, 3)),
        *(f"-O{level} + kernels" for level in (2, 3)),
        *(f"-O{level} + kernels + graphs" for level in (2, 3)),
    }
    assert names.index("-O2") < names.index("-O3")
    fused = candidates([0, 1, 2, 3], has_kernels=True, can_graph=True)  # nothing is left to a compiler
    assert {way.name for way in ALL} - {way.name for way in fused} == {"-O3 + kernels", "-O3 + kernels + graphs"}
    plain = candidates([0, 1], has_kernels=True, can_graph=False)  # a GPU without bf16 has no use for the kernels
    assert [way.name for way in plain] == ["-O0", "-O1"] or [way.name for way in plain] == ["-O1", "-O0"]


@pytest.mark.parametrize("best", [way.name for way in ALL if way.graphs or not way.is_compiled])
def test_never_slower_than_any_other(best: str) -> None:
    seconds = {way.name: 1.0 + number / 10 for number, way in enumerate(ALL)} | {best: 0.5}
    choice = choose(ALL, *clocks(seconds))
    assert choice.candidate.name == best
    assert next(iter(choice.step_ms)) == best
    assert min(choice.step_ms.values()) == choice.step_ms[best] == 500.0


def test_what_cannot_run_is_said_and_left() -> None:
    choice = choose(ALL, *clocks({"-O2": 2.0, "-O0": 1.0}))
    assert choice.candidate == Candidate(0)
    assert "-O2 + kernels cannot run here: no such thing" in choice.notes
    with pytest.raises(Failed, match="-O2 \\+ kernels: no such thing") as caught:
        choose(ALL, *clocks({}))
    assert "-O0" in caught.value.hint


def test_a_mistake_of_the_task_is_said_as_it_is() -> None:
    """Every way runs into it; what the plainest says is not about kernels, graphs or compiling."""

    def measure(way: Candidate, limit_s: float) -> float:
        raise CannotRun("it is wrong") from ValueError(f"wrong in {way.name}")

    with pytest.raises(ValueError, match="wrong in -O0"):
        choose(ALL, measure, lambda ways: {})


def test_what_the_machine_did_meanwhile_does_not_decide() -> None:
    """-O0 was disturbed while it was measured, and is the second therefore; in turns it is the fastest."""
    choice = choose(
        [Candidate(2), Candidate(1), Candidate(0)],
        *clocks({"-O2": 1.0, "-O1": 3.0, "-O0": 1.9}, {"-O2": 1.5, "-O0": 1.2}),
    )
    assert choice.candidate == Candidate(0)
    assert list(choice.step_ms) == ["-O0", "-O2", "-O1"]
    # And one that looked fast while all others were disturbed: what was measured in turns is compared with its like.
    slowed = choose(
        [Candidate(2), Candidate(1), Candidate(0)],
        *clocks({"-O2": 1.0, "-O1": 1.3, "-O0": 1.1}, {"-O2": 2.0, "-O0": 1.8}),
    )
    assert slowed.candidate == Candidate(0)


def test_of_equals_the_one_that_changes_least() -> None:
    assert sorted(ALL, key=lambda candidate: candidate.change)[:3] == [Candidate(0), Candidate(1), Candidate(2)]
    alike = {candidate.name: 1.0 + 0.001 * number for number, candidate in enumerate(ALL)}
    assert choose(ALL, *clocks(alike)).candidate == Candidate(0)
    near = {"-O2 + kernels + graphs": 1.0, "-O2 + graphs": 1.029, "-O0": 1.031}
    assert choose(ALL, *clocks(near)).candidate == Candidate(2, graphs=True)


def test_who_is_timed_again() -> None:
    seconds = {Candidate(3): 1.0, Candidate(2): 1.19, Candidate(1): 1.1, Candidate(0): 1.21}
    assert finalists(seconds) == [Candidate(3), Candidate(1), Candidate(2)]
    assert finalists({Candidate(2): 1.0, Candidate(1): 1.9, Candidate(0): 1.95}) == [Candidate(2), Candidate(1)]
    assert finalists({Candidate(2): 1.0, Candidate(0): 2.1}) == [Candidate(2)]


def test_without_room_for_all_at_once_the_first_times_stand() -> None:
    def in_turns(ways: Sequence[Candidate]) -> dict[Candidate, float]:
        raise CannotRun("out of memory")

    choice = choose([Candidate(2), Candidate(0)], clocks({"-O2": 1.0, "-O0": 1.1})[0], in_turns)
    assert choice.candidate == Candidate(2)
    assert choice.notes == ("-O2, -O0 were timed one after the other only: out of memory",)


def test_compiling_is_not_tried_where_it_cannot_win() -> None:
    asked: list[str] = []
    seconds = {way.name: 10.0 for way in ALL} | {"-O2 + kernels + graphs": 1.0}
    choice = choose(ALL, *clocks(seconds, asked=asked))
    assert [name for name in asked if "-O3" in name] == ["-O3 + kernels + graphs"], "which nobody is far ahead of"
    assert "-O3 was not tried: -O2 is 10.0 times slower than the best" in choice.notes
    asked.clear()
    choose(ALL, *clocks(seconds | {"-O2 + graphs": 3.0}, asked=asked))
    assert "-O3 + graphs" in asked


def test_compiling_is_hardly_tried_beside_kernels_that_leave_nothing() -> None:
    """Minutes of compiling for what the kernels have done already; but a way that is near may still win by it."""
    fused = candidates([0, 1, 2, 3], has_kernels=True, can_graph=True)
    for best, plain, is_tried in (("-O2 + kernels + graphs", 1.5, False), ("-O2 + kernels + graphs", 1.3, True)):
        asked: list[str] = []
        choose(fused, *clocks({way.name: plain for way in fused} | {best: 1.0}, asked=asked))
        assert any("-O3" in name for name in asked) == is_tried
    asked = []
    seconds = {way.name: 1.5 for way in fused if not way.kernels} | {"-O2": 1.0}  # kernels that do not run here
    choose(fused, *clocks(seconds, asked=asked))
    assert "-O3 + graphs" in asked


def test_fp32_is_not_tried_where_tf32_is_hopeless() -> None:
    """It takes a large network a minute on a GPU; beside plain ways, which a busy machine may slow down, it is."""
    asked: list[str] = []
    seconds = {way.name: 3.0 for way in ALL}
    choice = choose(ALL, *clocks(seconds | {"-O2 + kernels": 1.0}, asked=asked))
    assert "-O1" in asked
    assert "-O0" not in asked
    assert "-O0 was not tried: -O1 is 3.0 times slower than the best" in choice.notes
    for others in ({"-O2 + graphs": 1.6}, {"-O2": 1.0}):
        asked.clear()
        choose(ALL, *clocks(seconds | others, asked=asked))
        assert "-O0" in asked


def test_compiled_with_graphs_is_not_compiled_again_without() -> None:
    asked: list[str] = []
    seconds = {way.name: 1.0 for way in ALL}
    choice = choose(ALL, *clocks(seconds, asked=asked))
    assert [name for name in asked if "-O3" in name] == ["-O3 + kernels + graphs", "-O3 + graphs"]
    assert "-O3 was not tried: -O3 + graphs runs the same kernels without gaps between them" in choice.notes
    asked.clear()
    del seconds["-O3 + graphs"]  # cannot be recorded
    choose(ALL, *clocks(seconds | {"-O3": 0.5}, asked=asked))
    assert "-O3" in asked


def test_a_measurement_may_stop_at_twice_the_best() -> None:
    limits: dict[str, float] = {}

    def measure(way: Candidate, limit_s: float) -> float:
        limits[way.name] = limit_s
        return {"-O2 + kernels + graphs": 3.0, "-O2 + kernels": 1.0}.get(way.name, 2.0)

    choose(ALL, measure, lambda ways: dict.fromkeys(ways, 1.0))
    assert limits["-O2 + kernels + graphs"] == float("inf")
    assert limits["-O2 + kernels"] == 6.0
    assert limits["-O0"] == 2.0


def test_a_contest_ends() -> None:
    """Likely winners have been timed by then; compiling is the first thing that is left out."""
    names = [way.name for way in ALL]
    seconds = dict.fromkeys(names, 0.3) | {names[0]: 0.2}

    def tried(each_s: float) -> list[str]:
        asked: list[str] = []
        measure, in_turns = clocks(seconds, asked=asked)
        choice = choose(ALL, measure, in_turns, lambda: each_s * len(asked))
        assert choice.candidate.name == names[0]
        assert all("the contest had taken" in note for note in choice.notes if "was not tried" in note) or each_s == 0
        return asked

    assert "-O3 + kernels + graphs" in tried(0.0)
    assert tried(14.0) == [*(name for name in names if "-O2" in name), "-O1"]
    assert tried(1000.0) == names[:1]


def test_what_is_said() -> None:
    choice = Choice(Candidate(2, graphs=True), {"-O2 + graphs": 29.12, "-O0": 1234.5})
    assert choice.line("measured") == "-O4 is -O2 + graphs: 29.1 ms a step, measured; -O0 1,234 ms"
    assert Choice(Candidate(0)).line("as before") == "-O4 is -O0: as before"
