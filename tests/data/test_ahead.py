"""Workers that read on into the next epoch change nothing but when something is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline.data.ahead import Ahead, Seat, Turn
from paceline.data.fetch import Request
from paceline.data.grain import Grain
from paceline.data.loader import Loader
from tests.data.test_loader import Augmented, flat, make_plan

EPOCHS = 4


def turns(rank: int = 0, size: int = 1) -> list[Turn]:
    plans = [make_plan(epoch=epoch) for epoch in range(EPOCHS)]
    return [Turn(plan, range(plan.num_steps), epoch, Seat(rank, size)) for epoch, plan in enumerate(plans)]


def after(found: list[Turn]) -> Any:
    return lambda turn: found[turn.epoch + 1] if turn.epoch + 1 < len(found) else None


def run(loader: Loader, turn: Turn, then: Any) -> list[Any]:
    batches = loader.run(turn.plan, turn.steps, epoch=turn.epoch, seat=turn.seat, then=then)
    return flat(list(batches))


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (3, 4)])
def test_epochs_are_what_they_are_without(rank: int, size: int) -> None:
    found = turns(rank, size)
    plain = [run(Loader(Augmented(), workers=0, seed=1), turn, None) for turn in found]
    loader = Loader(Augmented(), workers=2, seed=1)
    assert [run(loader, turn, after(found)) for turn in found] == plain
    loader.close()


def test_what_is_asked_for_may_be_something_else() -> None:
    """An epoch broken off, another order, steps from the middle: read anew, as if nothing had been read on."""
    found = turns()
    loader = Loader(Augmented(), workers=2, seed=1)
    plain = [run(Loader(Augmented(), workers=0, seed=1), turn, None) for turn in found]
    broken = loader.run(found[0].plan, found[0].steps, epoch=0, then=after(found))
    next(broken)
    del broken
    assert run(loader, found[1], after(found)) == plain[1]
    assert run(loader, found[3], after(found)) == plain[3]  # not the one after it
    part = Turn(found[2].plan, range(2, 5), 2, Seat())
    assert run(loader, part, after(found)) == [row for row in plain[2] if 2 <= row[0] < 5]
    assert run(loader, found[3], after(found)) == plain[3]
    loader.close()


def test_requests_go_on_before_an_epoch_is_used_up() -> None:
    """A reader that is 20 requests ahead never stops between two epochs."""
    found = turns()
    ahead = Ahead(found[0], after(found))
    asked: list[tuple[int, int]] = []
    handed: list[tuple[int, int]] = []

    def read(requests: Iterator[Request]) -> Iterator[Grain]:
        waiting: list[Request] = []
        for request in requests:
            asked.append((request.epoch, len(handed)))
            waiting.append(request)
            if len(waiting) == 20:
                first = waiting.pop(0)
                yield Grain(first.epoch, first.number, first.samples)
        for rest in waiting:
            yield Grain(rest.epoch, rest.number, rest.samples)

    grains = read(ahead.requests())
    for turn in found:
        assert ahead.next is turn
        for batch in ahead.batches(turn, grains):
            assert all(grain.data == turn.epoch for grain in batch.grains)
            handed.append((batch.epoch, batch.step))
            assert batch.is_last == (batch.step == turn.steps[-1])
    assert ahead.next is None
    assert handed == [(epoch, step) for epoch in range(EPOCHS) for step in range(6)]
    # Every epoch but the first was asked for before the one before it had been handed out whole.
    for epoch in range(1, EPOCHS):
        first = next(done for number, done in asked if number == epoch)
        assert first < epoch * 6


def test_a_rank_without_a_grain_in_the_last_step() -> None:
    found = turns(rank=3, size=4)  # the last batch of an epoch has one grain
    loader = Loader(Augmented(), workers=1, seed=1)
    for turn in found:
        batches = list(loader.run(turn.plan, turn.steps, epoch=turn.epoch, seat=turn.seat, then=after(found)))
        assert [batch.step for batch in batches] == list(range(6))
        assert batches[-1].grains == []
        assert all(
            np.isin(grain.samples, turn.plan.batch(batch.step)).all() for batch in batches for grain in batch.grains
        )
    loader.close()


def test_only_workers_read_on() -> None:
    found = turns()
    asked: list[int] = []

    def then(turn: Turn) -> Turn | None:
        asked.append(turn.epoch)
        return None

    run(Loader(Augmented(), workers=0, seed=1), found[0], then)
    assert asked == []
    loader = Loader(Augmented(), workers=1, seed=1)
    run(loader, found[0], then)
    assert asked == [0]
    loader.close()
