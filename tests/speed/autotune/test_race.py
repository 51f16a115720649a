"""Runners take turns in an order that alternates; one disturbed round decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.speed.autotune.race import FEWEST_ROUNDS, ROUNDS, is_enough, medians, race


def test_the_order_alternates() -> None:
    order: list[str] = []

    def runner(name: str) -> Callable[[int], str]:
        def run(number: int) -> str:
            order.append(name)
            return f"{name}{number}"

        return run

    rounds = race([runner("a"), runner("b"), runner("c")], lambda rounds: len(rounds) == 3)
    assert "".join(order) == "abccbaabc"
    assert rounds == [("a0", "b0", "c0"), ("a1", "b1", "c1"), ("a2", "b2", "c2")]


def test_a_round_in_which_one_drops_out_does_not_count() -> None:
    rounds = race([lambda number: 1.0, lambda number: None if number == 2 else 2.0], lambda rounds: False)
    assert rounds == [(1.0, 2.0), (1.0, 2.0)]


def test_over_before_it_begins() -> None:
    assert race([lambda number: 1.0], lambda rounds: True) == []


def median(seconds: Iterator[float], limit_s: float = float("inf")) -> float:
    rounds = race([lambda number: next(seconds)], lambda rounds: is_enough(rounds, limit_s))
    return medians(rounds)[0]


def test_one_disturbed_round_decides_nothing() -> None:
    seconds = iter([1.2, 0.1, 0.1, *[0.1] * ROUNDS])
    assert median(seconds, limit_s=1.0) == 0.1
    assert len(list(seconds)) == 3  # it was timed to the end, not given up


def test_the_hopeless_are_left_after_a_few_rounds() -> None:
    seconds = iter([0.3] * 9)
    assert median(seconds, limit_s=0.1) == 0.3
    assert len(list(seconds)) == 9 - FEWEST_ROUNDS
    slow = iter([60.0, 61.0, 62.0, 63.0])  # past what is enough: still as many as it takes
    assert median(slow) == 61.0
    assert list(slow) == [63.0]
