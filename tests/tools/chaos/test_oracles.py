"""The oracles themselves: what they must find, with plain values."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from tools.chaos.campaign import Bad, Row, join, table
from tools.chaos.checkpoints import ResumeFacts, judge_resume
from tools.chaos.kills import RoundFacts, Shot, draw_rounds, judge_round
from tools.chaos.marathon import costs
from tools.chaos.runs import RunFacts, differences
from tools.chaos.survivors import rounds_of
from tools.chaos.tasks import VARIANTS

SHOT = Shot("step", 3, 0.0, "0", signal.SIGTERM)
STOPPED = RoundFacts((0, 0), (SHOT,), True, "", "stopped", 4, 3, ())


def test_a_stop_that_was_saved_holds() -> None:
    assert judge_round(STOPPED) == []


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"codes": (0, None)}, "still running"),
        ({"codes": (0, -15)}, "exit codes"),
        ({"status": "running"}, "status 'running'"),
        ({"newest_step": 2}, "a checkpoint of 2 steps"),
        ({"stderr": "Traceback (most recent call last):"}, "traceback"),
        ({"troubles": ("left running: 12 python",)}, "left running"),
        ({"fired": (), "codes": (1, 1)}, "undisturbed"),
    ],
)
def test_a_stop_that_did_not_hold_is_found(change: dict[str, Any], trouble: str) -> None:
    assert any(trouble in line for line in judge_round(replace(STOPPED, **change)))


def test_a_kill_excuses_exit_codes_but_no_traceback() -> None:
    killed = replace(STOPPED, fired=(replace(SHOT, signal=signal.SIGKILL),), codes=(-9, 1), status="running")
    assert judge_round(killed) == []
    assert judge_round(replace(killed, stderr="Traceback"))


def finished() -> RunFacts:
    steps = [{"kind": "step", "step": number, "loss": 1.0} for number in range(3)]
    return RunFacts("finished", steps, [{"step": 3}], [(0, 3)], 3, {"model": {"w": torch.ones(2)}}, {"position": 3})


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"status": "running"}, "status"),
        ({"steps": [{"step": 0, "loss": 1.0}, {"step": 2, "loss": 1.0}]}, "steps in the journal: 0-0, 2-2"),
        ({"steps": [{"step": number, "loss": 1.0 + 1e-15} for number in range(3)]}, "losses"),
        ({"epochs": []}, "epochs"),
        ({"validations": []}, "validations"),
        ({"newest_step": 2}, "newest checkpoint"),
        ({"state": {"position": 2}}, "position is 2 instead of 3"),
        ({"parts": {}}, "parts"),
        ({"parts": {"model": {"w": torch.ones(2) * (1 + 1e-7)}}}, "1 of 1 tensors differ"),
        ({"parts": {"model": {"v": torch.ones(2)}}}, "in one only"),
        ({"parts": {"model": {"w": torch.full((2,), torch.nan)}}}, "1 of 1 tensors differ"),
    ],
)
def test_a_run_that_differs_is_found(change: dict[str, Any], trouble: str) -> None:
    assert differences(finished(), finished(), 0.0) == []
    assert any(trouble in line for line in differences(replace(finished(), **change), finished(), 0.0))


@pytest.mark.parametrize(
    ("facts", "holds", "must_equal"),
    [
        (ResumeFacts((0,), "", "", False), True, True),
        (ResumeFacts((0,), "", "", True), True, False),
        (ResumeFacts((2, 2), "error: broken", "", False), True, False),
        (ResumeFacts((2,), "", "", False), False, False),
        (ResumeFacts((1,), "KeyError", "", False), False, False),
        (ResumeFacts((None,), "", "", False), False, False),
        (ResumeFacts((0,), "", "\x1b[2J", False), False, True),
        (ResumeFacts((1, 1), "Traceback", "", True), False, False),
    ],
)
def test_a_resume_from_damage_is_judged(facts: ResumeFacts, holds: bool, must_equal: bool) -> None:
    troubles, equal = judge_resume(facts)
    assert (not troubles, equal) == (holds, must_equal)


def test_the_same_seed_draws_the_same_case() -> None:
    draws = [draw_rounds(random.Random(5), VARIANTS["plain"]) for _ in range(2)]
    assert draws[0] == draws[1]


def test_a_variant_that_cannot_change_its_ranks_does_not() -> None:
    for seed in range(30):
        assert len({each.ranks for each in draw_rounds(random.Random(seed), VARIANTS["average"])}) == 1


def test_rows_of_jobs_join_and_survive_json() -> None:
    bad = Bad("lost a step", "python -m tools.chaos kills --only 3", "folder")
    rows = [Row("kills", 5, [bad], 2.0, 10.0), Row("kills", 4, [], 3.0, 9.0)]
    joined = Row.from_json(join(rows).to_json())
    assert joined == Row("kills", 9, [bad], 3.0, 10.0)
    line = table([joined, Row("network", skipped="needs root")]).splitlines()
    assert line[1].split() == ["kills", "9", "8", "1", "3.0", "s", "10", "s"]
    assert line[2] == "network     skipped: needs root"


def test_costs_of_losses() -> None:
    """Beyond the time until the last of those lost together could be known; who had not joined yet costs nothing."""

    def loss(moment: float, how: str, *ranks: int) -> dict[str, Any]:
        return {"how": how, "place": "step", "ranks": list(ranks), "time": moment}

    def line(moment: float, *lost: int, joined: int = 0) -> dict[str, Any]:
        return {"time": moment, "lost": [{"host": f"plh{rank + 1}"} for rank in lost], "repeated": joined}

    rounds = [line(10.3, 1), line(12.0), line(23.5, 2, 3), line(33.2, 0), line(36.4, 2)]
    steps = [9.9, 10.5, 12.1, 23.75, 36.75, 60.0]
    done = [loss(10.0, "killed", 1), loss(20.0, "killed", 2), loss(20.25, "frozen", 3), loss(25.0, "frozen", 3)]
    found = costs([*done, loss(33.0, "killed", 0), loss(33.25, "frozen", 2)], rounds, steps)
    assert [(cost.how, cost.seconds, cost.beyond_s) for cost in found] == [
        ("killed", 0.5, 0.5),
        ("killed", 3.75, 0.5),  # went on when the frozen one was known, too
        ("frozen", 3.5, 0.5),
        ("killed", 3.75, 0.5),  # another was frozen before the next step
        ("frozen", 3.5, 0.5),
    ]


def test_rounds_whose_steps_count() -> None:
    def line(step: int, ranks: int) -> dict[str, int]:
        return {"step": step, "ranks": ranks}

    assert rounds_of([line(0, 3)]) == [(3, None)]
    assert rounds_of([line(0, 3), line(23, 2), line(29, 3)]) == [(3, 24), (2, 30), (3, None)]
    assert rounds_of([line(0, 3), line(23, 2), line(29, 3), line(23, 1)]) == [(3, 24), (1, None)]
    assert rounds_of([line(0, 3), line(0, 2)]) == [(2, None)]
