"""Common time axis of all ranks: how far the clocks of their machines are apart.

Ranks of one machine read one clock. Between machines, a question and its answer bound the difference: the answer was
given between sending and receiving, so the middle of the two is wrong by half of the way there and back at most
(Cristian 1989). The quickest of several tries is taken.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import torch

from paceline.world.link import Link

NUM_TRIES = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Offset:
    """Difference that makes a rank's clock the first rank's."""

    ns: int = 0
    uncertainty_ns: int = 0
    """The true one is not further away than this."""


@dataclass(frozen=True)
class Try:
    """Question to the first rank: sent and received by this rank's clock, answered by the first rank's."""

    sent_ns: int
    answered_ns: int
    received_ns: int


def offset(tries: Sequence[Try]) -> Offset:
    """Return the offset from the quickest try."""
    best = min(tries, key=lambda each: each.received_ns - each.sent_ns)
    way_ns = best.received_ns - best.sent_ns
    return Offset(best.answered_ns - (best.sent_ns + best.received_ns) // 2, way_ns // 2 + 1)


def machine() -> str:
    """Return a name that only processes with the same clock have in common."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # no Linux
        return socket.gethostname()


def measure(link: Link, where: str | None = None, now_ns: Callable[[], int] = perf_counter_ns) -> Offset:
    """Measure this rank's offset. All ranks must call it; `where` names the clock that this rank reads."""
    machines = link.gather_objects(machine() if where is None else where)
    # The first rank of each other machine asks; all ranks hear both, which a broadcast is.
    askers = [rank for rank, name in enumerate(machines) if machines.index(name) == rank and rank > 0]
    result = Offset()
    for asker in askers:
        tries = []
        for _ in range(NUM_TRIES):
            question, answer = (
                torch.zeros(1, dtype=torch.int64, device="cpu"),
                torch.zeros(1, dtype=torch.int64, device="cpu"),
            )
            sent_ns = now_ns()
            link.broadcast(question, src=asker)
            if link.is_first:
                answer[0] = now_ns()
            link.broadcast(answer)
            tries.append(Try(sent_ns, int(answer), now_ns()))
        measured = link.broadcast_object(offset(tries), src=asker)
        if machines[link.world.rank] == machines[asker]:
            result = measured
    return result
