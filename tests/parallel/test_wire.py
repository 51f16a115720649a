"""Formats on the wire: how far a number may be off, that nothing is lost over time, that ranks get the same bits."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.wire import BLOCK, Exchange, Wire, build
from paceline.world.link import Link
from tests.ranks import ranks


def wire_of(name: str) -> Wire:
    wire = build(name)
    assert wire is not None
    return wire


@pytest.mark.parametrize(("name", "relative"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_halves_round_each_number(name: str, relative: float) -> None:
    values = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    payload = wire_of(name).encode(values)
    assert payload.shape == (3, wire_of(name).num_bytes(2 * BLOCK)) == (3, 4 * BLOCK)
    back = wire_of(name).decode(payload)
    assert ((back - values).abs() <= values.abs() * relative + 2**-24).all()


def test_int8_is_within_half_a_step_of_each_block() -> None:
    values = torch.randn(2, 3 * BLOCK, generator=torch.Generator().manual_seed(1))
    values[0, :BLOCK] *= 1e6
    values[1, BLOCK : 2 * BLOCK] = 0.0
    wire = wire_of("int8")
    payload = wire.encode(values)
    assert payload.shape == (2, wire.num_bytes(3 * BLOCK)) == (2, 3 * BLOCK + 12)
    back = wire.decode(payload)
    peaks = values.view(2, 3, BLOCK).abs().amax(2, keepdim=True)
    errors = (back - values).view(2, 3, BLOCK).abs()
    assert (errors <= peaks * (0.5 / 127) * (1 + 1e-5)).all()
    assert back[1, BLOCK : 2 * BLOCK].eq(0).all()


def test_not_a_number_stays_one() -> None:
    values = torch.zeros(1, 2 * BLOCK)
    values[0, 3] = float("nan")
    back = wire_of("int8").decode(wire_of("int8").encode(values))
    assert back[0, :BLOCK].isnan().any()
    assert back[0, BLOCK:].eq(0).all()


def numbers(rank: int, time: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * time + rank))


@ranks(2, 4)
def test_what_is_lost_is_sent_later(link: Link) -> None:
    """Over many exchanges the sum of sums is off by what one exchange loses, not by what all lose."""
    length, times, size = 5000, 40, link.world.size
    for name, step in (("int8", 4.5 / 127), ("bf16", 4.5 * 2**-8)):
        exchange = Exchange(length, wire_of(name), torch.distributed.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
        drift = torch.zeros(length, dtype=torch.float64)
        worst = 0.0
        for time in range(times):
            exchange.start(numbers(link.world.rank, time, length))
            while time % 2 and not exchange.poll():
                pass
            total = exchange.finish()
            exact = sum(numbers(rank, time, length).double() for rank in range(size))
            drift += total.double() - exact
            worst = max(worst, float(drift.abs().max()))
            prints = link.gather_objects(total.tolist()[::97])
            assert prints == [prints[0]] * size
        # Half a step for each rank's numbers and for the sum of them, which is at most `size` times as large.
        assert 0 < worst < size * step
