"""The promise of the house: the same losses, statistics and weights at 1, 2 and 4 ranks, and in a raw PyTorch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.settings import TrainConfig
from paceline.observe.journal import read
from paceline.train import loop
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.exact import add_up
from tests.train.ragged import RaggedTask, raw_loop

STEPS, GRAINS, BATCH, LR, SEED = 30, 4, 24, 0.05, 3


def train(link: Link, folder: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    config = TrainConfig(
        steps=STEPS,
        grains=GRAINS,
        global_batch=BATCH,
        optimizer="sgd",
        lr=LR,
        seed=SEED,
        out=f"{folder}/{link.world.size}",  # type: ignore[arg-type]
        **settings,
    )
    trainer = open_run(RaggedTask(), config, link)
    loop.train(trainer)
    return {name: tensor.clone() for name, tensor in trainer.stepper.model.state_dict().items()}


def losses_of(folder: str, size: int) -> list[float]:
    records = read(Path(folder) / str(size) / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    return [record["loss"] for record in records]


@pytest.mark.parametrize(
    ("precision", "dtype", "sums"),
    [
        ("fp64", torch.float64, "fast"),
        pytest.param(None, torch.float32, "fast", marks=pytest.mark.long),
        (None, torch.float32, "exact"),
    ],
)
def test_losses_and_statistics_do_not_depend_on_ranks(
    tmp_path: Any, precision: Any, dtype: torch.dtype, sums: str
) -> None:
    order = add_up if sums == "exact" else None
    raw_losses, raw_model = raw_loop(dtype, STEPS, grains=GRAINS, global_batch=BATCH, lr=LR, seed=SEED, add_up=order)
    raw_state = raw_model.state_dict()
    bound, first_bound = (1e-12, 1e-12) if dtype is torch.float64 else (1e-5, 1e-6)
    settings = {"precision": precision, "level": 0, "sums": sums}
    for size in (1, 2, 4):
        states = run_ranks(size, train, str(tmp_path), settings)
        losses = losses_of(str(tmp_path), size)
        for step, (ours, raw) in enumerate(zip(losses, raw_losses, strict=True)):
            limit = first_bound if step == 0 else bound
            assert abs(ours - raw) <= limit * abs(raw), f"{size} ranks, step {step}: {ours} against {raw}"
        for state in states:
            for name, raw_value in raw_state.items():
                if "running" in name:
                    assert torch.allclose(state[name], raw_value, rtol=bound, atol=bound), name
                elif "tracked" in name:
                    assert torch.equal(state[name], raw_value), name
                elif size == 1 or sums == "exact":
                    assert torch.equal(state[name], raw_value), f"{name} is not bitwise equal to the raw loop"
                else:
                    assert torch.allclose(state[name], raw_value, rtol=0, atol=10 * bound), name
            for name, value in state.items():
                assert torch.equal(value, states[0][name]), f"{name} differs between ranks"
