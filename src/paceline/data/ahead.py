"""Reading on into the next epoch: one unbroken row of requests, so that workers never wait for an epoch to end.

What is asked for and in which order is the plan's decision in every epoch; this only keeps the row of requests and the
batches that they make in step, whoever is ahead of whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.data.fetch import Request
from paceline.data.grain import Batch, Grain
from paceline.data.plan import Plan, Share


@dataclass(frozen=True)
class Seat:
    """Which part of every batch this rank takes.

    `shard`: `rank` of `size` in one common plan. `random_seed_offset`: the whole of its own plan (rank 0 of 1), one of
    `plans` such plans, whose grains are numbered one after the other.
    """

    rank: int = 0
    size: int = 1
    plans: int = 1
    plan: int = 0


@dataclass(frozen=True, eq=False)
class Turn:
    """Some steps of one epoch for one rank; those past its plan's end (another's is longer) have no grains."""

    plan: Plan
    steps: range
    epoch: int
    seat: Seat

    def is_same(self, other: Turn) -> bool:
        return self.plan is other.plan and (self.steps, self.epoch, self.seat) == (other.steps, other.epoch, other.seat)


Then = Callable[[Turn], Turn | None]
"""What comes after a turn; None: nothing that could be known."""


class Ahead:
    """Requests of one turn after the other, and the batches of their grains."""

    def __init__(self, first: Turn, then: Then) -> None:
        self._first, self._then = first, then
        self._turns: deque[Turn] = deque()  # begun to be asked for, and not yet handed out whole
        self._shares: deque[Share] = deque()  # of these turns
        self._read: deque[Grain] = deque()
        self.next: Turn | None = first
        """The turn that can be had without asking anew; None while one is under way, and when there is none."""

    def requests(self) -> Iterator[Request]:
        """As long as there is a next turn."""
        turn: Turn | None = self._first
        while turn is not None:
            plan, seat = turn.plan, turn.seat
            self._turns.append(turn)
            for step in turn.steps:
                if step >= plan.num_steps:
                    break
                share = plan.share(step, seat.rank, seat.size)
                self._shares.append(share)
                for number, samples in zip(share.numbers, share.grains, strict=True):
                    # All plans have as many samples in a step, and so as many grains, unless cost decides.
                    yield Request(turn.epoch, number + seat.plan * share.num_grains, samples)
            turn = self._then(turn)

    def batches(self, turn: Turn, grains: Iterator[Grain]) -> Iterator[Batch]:
        """Those of the `next` turn; `grains` are those of `requests`."""
        self.next, seat = None, turn.seat
        shares, read = self._shares, self._read
        for step in turn.steps:
            is_last = step == turn.steps[-1]
            if step >= turn.plan.num_steps:
                yield Batch(turn.epoch, step, 0, 0, 1.0, [], is_last, has_next=False)
                continue
            while not shares or len(read) < len(shares[0].numbers):
                grain = next(grains, None)
                if grain is None:
                    break
                read.append(grain)
            share = shares.popleft()
            yield Batch(
                turn.epoch,
                step,
                num_grains=share.num_grains * seat.plans,
                num_samples=share.num_samples * seat.plans,
                count=share.count * seat.plans,
                grains=[read.popleft() for _ in share.numbers],
                is_last=is_last,
                has_next=not is_last,
                own_count=share.own_count,
                samples=share.samples,
            )
        if self._turns:
            self._turns.popleft()
        self.next = self._turns[0] if self._turns else None
