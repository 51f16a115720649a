"""Optimizer state on ranks that step apart: against the mean by hand, with entries that some ranks do not have."""

from __future__ import annotations

import pytest
import torch

from paceline.config.settings import ReduceSettings
from paceline.data.grain import Batch
from paceline.parallel.averaged.flat_average import reset
from paceline.parallel.averaged.strategy import Averaged
from paceline.parallel.step import Step
from paceline.world.link import Link
from tests.ranks import ranks


def adam(rank: int, is_used: bool = True) -> tuple[list[torch.nn.Parameter], torch.optim.Adam]:
    """Two parameters after `rank + 1` steps; the second only where it is used."""
    weights = [torch.nn.Parameter(torch.full((3,), float(rank), dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.Adam(weights, lr=0.1)
    for step in range(rank + 1):
        weights[0].grad = torch.full((3,), step + 1.0, dtype=torch.float64)
        weights[1].grad = torch.full((3,), rank - 5.0, dtype=torch.float64) if is_used else None
        optimizer.step()
    return weights, optimizer


@ranks(2, 4)
def test_entries_are_averaged_and_missing_ones_are_zero(link: Link) -> None:
    rank, size = link.world.rank, link.world.size
    weights, optimizer = adam(rank, is_used=rank != 0)
    averaging = Averaged(weights, link, ReduceSettings(reduce="param", sync_step=1), optimizer=optimizer, buffers={})
    everyone = [adam(other, is_used=other != 0) for other in range(size)]
    averaging.begin(Batch(0, 0, 1, 1, 5.0 * size, []))
    averaging.finish(Step(0, torch.tensor(1.0), 5, True, False))
    for number in range(2):
        states = [their_optimizer.state[their_weights[number]] for their_weights, their_optimizer in everyone]
        for entry in ("exp_avg", "exp_avg_sq"):
            zeros = torch.zeros(3, dtype=torch.float64)
            expected = torch.stack([state.get(entry, zeros) for state in states]).mean(0)
            torch.testing.assert_close(optimizer.state[weights[number]][entry], expected, rtol=1e-13, atol=1e-13)
        counts = [float(state.get("step", 0.0)) for state in states]
        assert optimizer.state[weights[number]]["step"] == round(sum(counts) / size)
        mean = torch.stack([their_weights[number].detach() for their_weights, _ in everyone]).mean(0)
        torch.testing.assert_close(weights[number].detach(), mean, rtol=1e-13, atol=1e-13)
    averaging.detach()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "Rprop", "NAdam", "RMSprop"])
def test_reset_is_a_fresh_optimizer(name: str) -> None:
    def make(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if name == "SGD" else {}
        made: torch.optim.Optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
        return made

    used = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = make(used)
    used.grad = torch.arange(4).double()
    optimizer.step()
    reset(optimizer)
    fresh = torch.nn.Parameter(used.detach().clone())
    other = make(fresh)
    for step in range(3):
        used.grad = fresh.grad = torch.arange(4).double() - step
        optimizer.step()
        other.step()
        torch.testing.assert_close(used, fresh, rtol=1e-14, atol=1e-14)
