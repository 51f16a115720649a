"""The search of `paceline tune` on machines made of numbers: what is fast is found, what only seems fast is not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.lab.tune import report as tune_report
from paceline.lab.tune.knobs import Facts, LevelFacts, finer, is_free, knobs
from paceline.lab.tune.search import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Changes,
    Failure,
    Speed,
    Trial,
    make_fit,
    search,
    speed_of,
)
from paceline.speed.autotune.proof import FIRST_LOOK
from tests.lab.tune.tune_machine import GRAINS, LEVEL, WORKERS, Machine, formula, knob


def test_the_fastest_is_found_coordinate_by_coordinate() -> None:
    machine = Machine(formula)
    found = machine.search(GRAINS, WORKERS, LEVEL)
    assert dict(found.winner) == {"level": 3, "workers": 4, "grains": 8}
    assert found.rounds == pytest.approx([1.7 * 1.6 * 1.1] * MOST_ROUNDS)
    assert machine.log[:3] == [{}, {"level": 2}, {"level": 3}]  # the largest expected gain first
    assert {"grains": 1} not in [{"grains": log.get("grains")} for log in machine.log]  # worse at 2, so 1 is left out
    # The final goes back and forth between default and winner.
    last = [bool(log) for log in machine.log[-2 * MOST_ROUNDS :]]
    assert last == [True, False, False, True, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_hide_what_is_clearly_faster(seed: int) -> None:
    chance = random.Random(seed)
    machine = Machine(lambda changes, number: formula(changes, number) * chance.gauss(1.0, 0.03))
    winner = machine.search(GRAINS, WORKERS, LEVEL).winner
    assert formula(winner, 0) >= 0.8 * formula({"level": 3, "workers": 4, "grains": 8}, 0)


def test_noise_does_not_pick() -> None:
    """A hundred machines on which nothing makes a difference: hardly any of them is given a setting."""
    picked = 0
    for seed in range(100):
        chance = random.Random(seed)
        machine = Machine(lambda changes, number, chance=chance: 100 * chance.gauss(1.0, 0.03))
        picked += not machine.search(GRAINS, WORKERS, LEVEL).default_wins
    assert picked <= 15  # ahead twice and then three times: by luck in 1 of 32 pairs at most, times the pairs


def test_what_was_lucky_twice_loses_the_final() -> None:
    # default, workers 1 (lucky), workers 2 (worse); again 1 (lucky) and default; then the rounds, in turns
    script = iter([100, 120, 90, 118, 100, 103, 100, 100, 97, 101, 100])
    machine = Machine(lambda changes, number: float(next(script)))
    found = machine.search(WORKERS)
    assert found.default_wins
    assert dict(found.rival) == {"workers": 1}
    assert found.rounds == pytest.approx([1.03, 0.97, 1.01])
    assert tune_report.sentence(found) == "the default stays: nothing is proven to be faster in turns"
    (said,) = tune_report.unproven(found)
    assert "`workers 1` looked 1.03x as fast alone, but was 1.01x in turns: ahead in 2 of 3 rounds" in said
    assert "(0.97x to 1.03x)" in said


def test_a_machine_that_gets_faster_gives_no_setting_an_advantage() -> None:
    machine = Machine(lambda changes, number: 100 * 1.03**number)
    assert machine.search(WORKERS).default_wins


def test_a_race_finds_through_heavy_noise() -> None:
    """With a deviation of 20 % in every number."""
    found_it = 0
    for seed in range(50):
        chance = random.Random(seed)
        machine = Machine(
            lambda changes, number, chance=chance: max(1.0, formula(changes, number) * chance.gauss(1.0, 0.2))
        )
        found = machine.search(LEVEL, WORKERS, side_by_side=True)
        found_it += formula(found.winner, 0) >= 1.4 * formula({}, 0) and len(found.rounds) >= FIRST_LOOK
    assert found_it >= 45


def test_a_race_does_not_pick_by_noise() -> None:
    picked = 0
    for seed in range(200):
        chance = random.Random(seed)
        machine = Machine(lambda changes, number, chance=chance: max(1.0, 100 * chance.gauss(1.0, 0.2)))
        picked += not machine.search(GRAINS, WORKERS, LEVEL, side_by_side=True).default_wins
    # One race of 2 % for each of three knobs, and another where more than one of them was lucky.
    assert picked <= 3 * 0.02 * 200


def test_nothing_to_try_is_said() -> None:
    said = tune_report.sentence(Machine(formula).search())
    assert said == "the default stays: there was nothing else to try"


def test_a_race_ends_when_it_is_decided_and_is_not_run_twice() -> None:
    machine = Machine(formula)
    found = machine.search(LEVEL, side_by_side=True)
    assert found.rounds == pytest.approx([1.7] * FIRST_LOOK)
    assert machine.num_races == 1  # the only knob has just raced the default
    machine = Machine(formula)
    assert dict(machine.search(LEVEL, WORKERS, side_by_side=True).winner) == {"level": 3, "workers": 4}
    assert machine.num_races == 3


def test_time_is_kept_for_a_last_race_as_long_as_the_first() -> None:
    for budget_s in range(20, 200, 7):
        machine = Machine(formula, float(budget_s))
        found = machine.search(LEVEL, WORKERS, GRAINS, side_by_side=True)
        assert machine.spent_s <= budget_s
        if found.rival:
            assert not found.default_wins, budget_s


def test_without_room_for_two_the_rounds_come_one_after_the_other() -> None:
    machine = Machine(formula)
    found = search(machine.measure({}, 1e9), [LEVEL], machine.measure, machine.left_s, lambda one, other, limit_s: [])
    assert dict(found.winner) == {"level": 3}
    assert len(found.rounds) == MOST_ROUNDS


def test_nothing_faster() -> None:
    machine = Machine(lambda changes, number: 50.0 if changes else 100.0)
    found = machine.search(GRAINS, WORKERS, LEVEL)
    assert found.default_wins
    assert not found.winner
    assert tune_report.sentence(found) == "the default wins: nothing that was tried is faster"
    assert machine.log.count({}) == 1  # no final is needed


@pytest.mark.parametrize("budget_s", [5.0, 20.0, 40.0, 60.0, 90.0, 200.0])
def test_the_budget_is_kept(budget_s: float) -> None:
    machine = Machine(formula, budget_s)
    found = machine.search(GRAINS, WORKERS, LEVEL)
    assert machine.spent_s <= budget_s
    assert found.default_wins or len(found.rounds) >= LEAST_ROUNDS
    if budget_s < 40:
        assert found.default_wins
        assert set(found.untried) == {"level", "workers", "grains"}
        assert "there was no time to try anything else" in tune_report.sentence(found)
    if budget_s >= 60:
        assert found.winner["level"] == 3


def test_what_looked_faster_without_a_final_is_not_called_slower() -> None:
    costs = iter([5.0, 5.0, 30.0])

    def measure(changes: Changes, limit_s: float) -> Trial:
        nonlocal left
        cost = next(costs)
        left -= cost
        return Trial(changes, Speed(200.0 if changes else 100.0), cost)

    left = 45.0
    found = search(measure({}, 1e9), [LEVEL], measure, lambda: left)
    assert found.default_wins
    assert "the default stays: there was no time to race `level 2` against it" in tune_report.sentence(found)


def test_memory_ends_a_way_and_the_search_goes_on() -> None:
    def speed(changes: Mapping[str, Any], number: int) -> float | Failure:
        if changes.get("grains", 4) <= 2:
            return Failure("memory", "out of memory on a grain of 32 samples")
        return formula(changes, number)

    machine = Machine(speed)
    found = machine.search(GRAINS, WORKERS)
    assert dict(found.winner) == {"workers": 4, "grains": 8}
    assert [log.get("grains") for log in machine.log].count(2) == 1
    assert not [log for log in machine.log if log.get("grains") == 1]
    rows = {row[0]: row for row in tune_report.rows(found)}
    assert rows["workers 4, grains 2"][3] == "out of memory"
    assert rows["workers 4, grains 8 *"][2:4] == ("1.76x", "1.76x")


def test_a_second_look_that_fails_changes_nothing() -> None:
    # default, level 2 (faster), level 3 (slower); once more: 2 is not in time; workers 1 is faster, 2 not; again; final
    script = iter([100, 150, 90, 0, 130, 130, 131, 100, 130, 100, 100, 130, 130, 100])
    machine = Machine(lambda changes, number: float(next(script)) or Failure("time"))
    found = machine.search(LEVEL, knob("workers", (1, 2)))
    assert dict(found.winner) == {"workers": 1}
    assert found.rounds == pytest.approx([1.3] * MOST_ROUNDS)


def test_a_default_that_does_not_fit_is_cut_finer() -> None:
    machine = Machine(lambda changes, number: 50.0 if changes.get("grains", 1) >= 4 else Failure("killed"))
    default = machine.measure({}, 1e9)
    fits, tried = make_fit(default, [{"grains": 2}, {"grains": 4}, {"grains": 8}], machine.measure, machine.left_s)
    assert fits is not None
    assert fits.changes == {"grains": 4}
    assert [trial.changes for trial in tried] == [{}, {"grains": 2}, {"grains": 4}]
    none, tried = make_fit(default, [{"grains": 2}], machine.measure, machine.left_s)
    assert none is None
    assert len(tried) == 2


def test_trials_of_one_setting_are_joined() -> None:
    joined = speed_of([Trial({}, Speed(rate, 0.01, rate), 1.0) for rate in (90, 100, 120)])
    assert isinstance(joined, Speed)
    assert (joined.samples_per_s, joined.spread, joined.memory_bytes) == (100, 0.15, 120)
    failed = Trial({}, Failure("time"), 1.0)
    assert speed_of([failed]) == failed.outcome
    assert speed_of([Trial({}, Speed(5.0, 0.2), 1.0), failed]) == Speed(5.0, 0.2)


# -- what there is to try --------------------------------------------------------------------------------------------


def facts(**known: Any) -> Facts:
    levels = (LevelFacts(0, "fp32", False), LevelFacts(1, "fp32", False), LevelFacts(2, "bf16", False))
    usual: dict[str, Any] = {
        "device": "cpu",
        "device_name": "this CPU",
        "ranks": 2,
        "cores": 8,
        "threads": 4,
        "grains": 4,
        "levels": (*levels, LevelFacts(3, "bf16 compiled", True)),
        "computes": "fp32",
        "compiles": False,
        "num_samples": 1000,
        "has_lengths": True,
        "padding": 0.3,
        "is_stream": False,
    }
    return Facts(**{**usual, **known})


ALL = ("level", "compile", "grains", "workers", "order", "threads")


def values(known: Facts, speed: Speed | None = None, **settings: Any) -> dict[str, Any]:
    config = TrainConfig(epochs=1, global_batch=32, **settings)
    found, _ = knobs(known, speed or Speed(100.0, data_share=0.5, workers=2), config, ALL, keep_numerics=False)
    return {each.name: [[dict(value) for value in way] for way in each.paths] for each in found}


def test_what_is_tried_follows_from_the_facts() -> None:
    assert values(facts()) == {
        "level": [[{"level": 2}]],  # 1 is the same as 0 on a CPU
        "compile": [[{"level": 3}, {"level": 3, "compile_mode": "max-autotune"}]],
        "grains": [[{"grains": 2}], [{"grains": 8}, {"grains": 16}, {"grains": 32}]],
        "workers": [[{"workers": 4}, {"workers": 8}], [{"workers": 1}, {"workers": 0}]],
        "order": [[{"order": "bucket"}]],
        "threads": [[{"threads": 2}, {"threads": 1}]],
    }
    assert values(facts(), order="bucket", bins=4)["order"] == [[{"bins": 8}, {"bins": 16}]]
    assert "order" not in values(facts(has_lengths=False, padding=None))
    assert values(facts(is_stream=True, num_samples=None)).keys() == {"level", "compile", "grains", "threads"}
    assert "grains" not in values(facts(grains=2), sync_batchnorm="all")
    assert "threads" not in values(facts(device="cuda"))
    compiled = values(facts(computes="bf16 compiled", compiles=True), compile_mode="max-autotune")
    assert compiled["compile"] == [[{"compile_mode": "default"}]]
    assert compiled["level"] == [[{"level": 2}], [{"level": 0}]]
    assert finer(facts(grains=16), TrainConfig(epochs=1, global_batch=16)) == []
    assert finer(facts(grains=2), TrainConfig(epochs=1, batch_cost=100.0))[-1] == {"grains": 16}


def test_what_cannot_win_is_left_out_with_its_reason() -> None:
    config = TrainConfig(epochs=1)
    found, why = knobs(facts(padding=0.01), Speed(100.0, data_share=0.004), config, ALL, keep_numerics=False)
    assert {"order", "workers"}.isdisjoint(each.name for each in found)
    assert why == ["workers: data is waited for 0.4% of the time", "order: 1.0% padding leaves nothing to win"]


def test_numerics_can_be_kept() -> None:
    found, why = knobs(facts(), Speed(100.0, data_share=0.5, workers=2), TrainConfig(epochs=1), ALL, keep_numerics=True)
    assert {each.name for each in found} == {"workers", "threads"}
    assert [reason for reason in why if reason.endswith("changes numerics")] == [
        f"{name}: changes numerics" for name in ("level", "compile", "grains", "order")
    ]
    assert all(is_free(name) for each in found for way in each.paths for value in way for name in value)
