"""The search of `paceline tune` on machines made of numbers: what is fast is found, what only seems fast is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.train import tune_report
from paceline.train.tune import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Changes,
    Contest,
    Failure,
    Found,
    Knob,
    Speed,
    Trial,
    budget_for,
    make_fit,
    ratios_of,
    search,
    speed_of,
)
from paceline.train.tune_proof import FIRST_LOOK, is_decided
from paceline.train.tune_space import Facts, LevelFacts, finer, is_free, knobs

TRIAL_S = 5.0


class Machine:
    """Trials by a formula, on a clock of its own."""

    def __init__(self, speed: Callable[[Mapping[str, Any], int], float | Failure], budget_s: float = 1e4) -> None:
        self._speed, self.spent_s, self._budget_s = speed, 0.0, budget_s
        self.log: list[dict[str, Any]] = []
        self.num_races = 0

    def measure(self, changes: Changes, limit_s: float) -> Trial:
        self.log.append(dict(changes))
        found = self._speed(changes, len(self.log))
        self.spent_s += min(TRIAL_S, limit_s)
        if isinstance(found, Failure):
            return Trial(changes, found, TRIAL_S)
        return Trial(changes, Speed(found, 0.01, 1 << 30), TRIAL_S)

    def left_s(self) -> float:
        return self._budget_s - self.spent_s

    def race(self, first: Trial, second: Trial, limit_s: float) -> list[tuple[Trial, Trial]]:
        """Side by side: the machine is as slow for one as for the other."""
        self.spent_s += min(2 * TRIAL_S, limit_s)
        pairs: list[tuple[Trial, Trial]] = []
        self.num_races += 1
        while not is_decided(ratios_of(pairs)):
            number = len(pairs)
            speeds = [self._speed(trial.changes, number) for trial in (first, second)]
            one, other = [
                Trial(trial.changes, Speed(speed), TRIAL_S)
                for trial, speed in zip((first, second), speeds, strict=True)
                if isinstance(speed, float)
            ]
            pairs.append((one, other))
        return pairs

    def search(self, *to_try: Knob, side_by_side: bool = False) -> Found:
        race = self.race if side_by_side else None
        return search(self.measure({}, 1e9), to_try, self.measure, self.left_s, race)


def knob(name: str, *ways: tuple[Any, ...], gain: float = 0.1) -> Knob:
    return Knob(name, tuple(tuple({name: value} for value in way) for way in ways), gain)


WORKERS = knob("workers", (1, 2, 4, 8), gain=0.3)
LEVEL = knob("level", (2,), (3,), gain=0.5)
GRAINS = knob("grains", (2, 1), (8, 16), gain=0.1)


def formula(changes: Mapping[str, Any], number: int) -> float:
    """Fastest: level 3, 4 workers, 8 grains."""
    level = {0: 1.0, 2: 1.4, 3: 1.7}[changes.get("level", 0)]
    workers = {0: 1.0, 1: 1.2, 2: 1.5, 4: 1.6, 8: 1.3}[changes.get("workers", 0)]
    grains = {1: 0.7, 2: 0.9, 4: 1.0, 8: 1.1, 16: 0.8}[changes.get("grains", 4)]
    return 100 * level * workers * grains


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
    script = iter([100, 150, 90, 0, 100, 130, 130, 131, 100, 130, 100, 100, 130, 130, 100])
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
    return {each.name: [[dict(value) for value in way] for way in each.ways] for each in found}


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
    assert all(is_free(name) for each in found for way in each.ways for value in way for name in value)


# -- in words ----------------------------------------------------------------------------------------------------------


def alone(changes: Changes, speed: float) -> Trial:
    return Trial(changes, Speed(speed, 0.01, 1 << 30), TRIAL_S)


def test_the_table_and_the_verdict_agree() -> None:
    """What looked faster alone and lost in turns, or was not raced, is neither hidden nor called slower."""
    lost = tuple([0.7, 0.9] * 5 + [1.3, 1.4])
    found = Found(
        (alone({}, 16000.0), alone({"level": 2}, 17630.0), alone({"level": 3}, 17780.0), alone({"grains": 2}, 14840.0)),
        {},
        {},
        contests=(Contest({}, {"level": 2}, lost),),
    )
    rows = {row[0]: row[1:4] for row in tune_report.rows(found)}
    assert rows == {
        "default *": ("16000", "1.00x", "-"),
        "level 2": ("17630", "1.10x", "0.90x"),
        "level 3": ("17780", "1.11x", "not raced"),
        "grains 2": ("14840", "0.93x", "-"),
    }
    assert tune_report.sentence(found) == "the default stays: nothing is proven to be faster in turns"
    two, three = tune_report.unproven(found)
    assert two.startswith("`level 2` looked 1.10x as fast alone, but was 0.90x in turns: ahead in 2 of 12 rounds")
    assert three == "`level 3` looked 1.11x as fast alone, but was not raced"


def test_a_ratio_is_of_one_race_or_of_trials_alone() -> None:
    """The samples/s of a row over the default's are its ratio; a race has another moment, and a column of its own."""
    first, winner = {"level": 2}, {"level": 2, "threads": 1}
    found = Found(
        (alone({}, 62.0), alone(first, 78.0), alone(winner, 107.4)),
        {},
        winner,
        rounds=(1.66,) * 8,
        rival=winner,
        contests=(Contest({}, first, (1.2,) * 8), Contest(first, winner, (1.4,) * 8), Contest({}, winner, (1.66,) * 8)),
    )
    rows = {row[0]: row[1:4] for row in tune_report.rows(found)}
    assert rows["level 2"] == ("78", f"{78 / 62:.2f}x", "1.20x")
    assert rows["level 2, threads 1 *"] == ("107.4", f"{107.4 / 62:.2f}x", "1.66x")
    assert "is 1.66x as fast as the default: ahead in 8 of 8 rounds" in tune_report.sentence(found)
    assert tune_report.unproven(found) == []
    unfinished = Found(found.trials, {}, {}, contests=found.contests[:2])
    assert tune_report.rows(unfinished)[2][3] == "1.40x of level 2"
    assert [line.split(":")[0] for line in tune_report.proven(unfinished)] == [
        "`level 2` is 1.20x as fast as `default`",
        "`level 2, threads 1` is 1.40x as fast as `level 2`",
    ]


def test_what_looks_faster_than_the_default_once_did_is_raced() -> None:
    """The default is faster in its race than it was alone; what lies between both is not passed over."""
    script = iter([100.0, 110.0, 90.0, 105.0, 90.0])
    races: list[Changes] = []

    def race(first: Trial, second: Trial, limit_s: float) -> list[tuple[Trial, Trial]]:
        races.append(second.changes)
        return [(alone(first.changes, 120.0), alone(second.changes, 100.0 + number % 3)) for number in range(8)]

    machine = Machine(lambda changes, number: next(script))
    found = search(machine.measure({}, 1e9), [LEVEL, knob("workers", (1, 2))], machine.measure, machine.left_s, race)
    assert races == [{"level": 2}, {"workers": 1}]
    assert found.default_wins
    assert [row[3] for row in tune_report.rows(found) if row[0] in ("level 2", "workers 1")] == ["0.84x", "0.84x"]


def test_numbers_and_budgets_can_be_read() -> None:
    assert [tune_report.number(value) for value in (19020.4, 1234.5, 62.05, 0.1234567)] == [
        "19020",
        "1234",
        "62.05",
        "0.1235",
    ]
    # One value of 7 s and a race, on top of what was spent.
    assert budget_for(100.0, 7.0, [knob("workers", (1,))]) == 130.0


def test_the_table_marks_the_winner_and_what_changes_results() -> None:
    found = Machine(formula).search(WORKERS, LEVEL)
    lines = tune_report.table(found)
    assert lines[0].split() == ["setting", "samples/s", "alone", "in", "turns", "memory", "spread", "results"]
    assert lines[1].split() == ["default", "100", "1.00x", "-", "1.0", "GiB", "±1.0%", "the", "same"]
    (won,) = [line for line in lines if "*" in line]
    assert won.split("  ")[1] == "level 3, workers 4 *"
    assert "2.72x" in won
    assert won.endswith("changed by level")
    assert len({len(line.rstrip("abcdefghijklmnopqrstuvwxyz ")) for line in lines[1:]}) == 1  # columns are aligned
    assert tune_report.numerics({"workers": 3, "threads": 1}) == ""
