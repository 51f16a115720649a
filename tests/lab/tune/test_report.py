"""What `paceline tune` found, in words: the table and the verdict agree, and say what was not proven."""

from __future__ import annotations

from paceline.lab.tune import report as tune_report
from paceline.lab.tune.search import Changes, Race, SearchResult, Speed, Trial, budget_for, search
from tests.lab.tune.tune_machine import LEVEL, TRIAL_S, WORKERS, Machine, formula, knob


def alone(changes: Changes, speed: float) -> Trial:
    return Trial(changes, Speed(speed, 0.01, 1 << 30), TRIAL_S)


def test_the_table_and_the_verdict_agree() -> None:
    """What looked faster alone and lost in turns, or was not raced, is neither hidden nor called slower."""
    lost = tuple([0.7, 0.9] * 5 + [1.3, 1.4])
    found = SearchResult(
        (alone({}, 16000.0), alone({"level": 2}, 17630.0), alone({"level": 3}, 17780.0), alone({"grains": 2}, 14840.0)),
        {},
        {},
        races=(Race({}, {"level": 2}, lost),),
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
    found = SearchResult(
        (alone({}, 62.0), alone(first, 78.0), alone(winner, 107.4)),
        {},
        winner,
        rounds=(1.66,) * 8,
        rival=winner,
        races=(Race({}, first, (1.2,) * 8), Race(first, winner, (1.4,) * 8), Race({}, winner, (1.66,) * 8)),
    )
    rows = {row[0]: row[1:4] for row in tune_report.rows(found)}
    assert rows["level 2"] == ("78", f"{78 / 62:.2f}x", "1.20x")
    assert rows["level 2, threads 1 *"] == ("107.4", f"{107.4 / 62:.2f}x", "1.66x")
    assert "is 1.66x as fast as the default: ahead in 8 of 8 rounds" in tune_report.sentence(found)
    assert tune_report.unproven(found) == []
    unfinished = SearchResult(found.trials, {}, {}, races=found.races[:2])
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
