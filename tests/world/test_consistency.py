"""Ranks that differ are told so, by name, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Engine, Task, TrainConfig, fit
from paceline.config.compared import shared_settings
from paceline.config.settings import per_rank
from paceline.data.grain import Grain
from paceline.train.run import open_run
from paceline.world.consistency import RanksDisagree, check_same, differences, installation
from paceline.world.link import Link
from tests.ranks import ranks

# -- the decision ------------------------------------------------------------------------------------------------------


def lines(everyone: list[dict[str, Any]], hosts: list[str] | None = None) -> list[str]:
    return [str(difference) for difference in differences(everyone, hosts or [])]


def test_a_difference_names_setting_ranks_and_values() -> None:
    assert lines([{"--lr": 0.1, "--seed": 0}, {"--lr": 0.2, "--seed": 0}]) == [
        "--lr is 0.1 on rank 0 and 0.2 on rank 1"
    ]
    everyone = [{"--ema": None}, {"--ema": 0.9}, {"--ema": 0.9}, {"--ema": None}, {"--ema": 0.99}]
    assert lines(everyone) == ["--ema is not set on ranks 0, 3, 0.9 on ranks 1-2 and 0.99 on rank 4"]


def test_machines_are_named_where_there_are_several() -> None:
    everyone = [{"torch": "2.11"}, {"torch": "2.11"}, {"torch": "2.13"}, {"torch": "2.13"}]
    assert lines(everyone, ["a", "a", "b", "b"]) == ["torch is 2.11 on ranks 0-1 and 2.13 on ranks 2-3 (host b)"]


def test_what_a_rank_does_not_know_is_not_compared() -> None:
    assert lines([{"code of plots.py": "1f", "task": "A"}, {"task": "A"}]) == []


def test_a_message_stays_readable() -> None:
    many = differences([{f"--x{number}": rank for number in range(40)} for rank in range(2)])
    assert str(RanksDisagree(many)).count("\n") == 13
    assert str(RanksDisagree(many)).endswith("and 28 more")


# -- what is compared --------------------------------------------------------------------------------------------------


class OwnSettings(TrainConfig):
    """A section as a task's author writes it."""

    margin: float = 0.1
    cache_mb: int = per_rank(64)


def test_every_setting_is_compared_unless_it_says_otherwise() -> None:
    compared = shared_settings(OwnSettings(epochs=1))
    assert {"--lr", "--seed", "--log-every", "--val-every-steps", "--out", "--margin"} <= compared.keys()
    left_out = {f"--{name.replace('_', '-')}" for name in OwnSettings.model_fields} - compared.keys()
    assert left_out == {
        *("--device", "--threads", "--start-timeout-s", "--timeout-s", "--workers"),
        *("--progress", "--rank-logs", "--loggers", "--cache-mb"),
    }


def test_installations_are_compared() -> None:
    facts = installation()
    assert facts["torch"] == torch.__version__
    assert facts["torch's default dtype"] == "float32"
    assert {"Python", "numpy", "paceline", "code of paceline", "$NVIDIA_TF32_OVERRIDE"} <= facts.keys()


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Points(Task):
    def __init__(self, num_val: int = 4) -> None:
        self.num_val = num_val

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_data(self) -> Any:
        return TensorDataset(torch.ones(8, 2), torch.ones(8))

    def val_data(self) -> dict[str, Any]:
        return {"dev": TensorDataset(torch.ones(self.num_val, 2), torch.ones(self.num_val))}

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        return (model(grain.x).squeeze(1) - grain.y).square().sum(), len(grain)


@ranks(2)
def test_ranks_that_differ_all_say_so(link: Link) -> None:
    rank = link.world.rank
    check_same(link, {"--lr": 0.1})
    with pytest.raises(RanksDisagree, match="--lr is 0 on rank 0 and 1 on rank 1"):
        check_same(link, {"--lr": rank})
    with pytest.raises(RanksDisagree, match="--seed is 0 on rank 0 and 1 on rank 1"):
        open_run(Points(), TrainConfig(epochs=1, seed=rank), link)
    with pytest.raises(RanksDisagree, match="number of samples of validation set 'dev' is 4 on rank 0 and 5 on rank 1"):
        open_run(Points(4 + rank), TrainConfig(epochs=1), link)
    check_same(link, {"--lr": 0.1})  # the group is as good as before


@ranks(2)
def test_a_loop_of_ones_own_is_compared_too(link: Link) -> None:
    rank = link.world.rank
    model, other = nn.Linear(2, 1), nn.Linear(2 + rank, 1)
    clipping, engine = Engine(link=link, clip_norm=1.0 + rank), Engine(link=link, level=0)
    with pytest.raises(RanksDisagree, match=r"--clip-norm is 1.0 on rank 0 and 2.0 on rank 1"):
        clipping.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RanksDisagree, match=r"lr of the optimizer is 0.1 on rank 0 and 0.2 on rank 1"):
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)))
    kind = (torch.optim.SGD, torch.optim.Adagrad)[rank]
    with pytest.raises(RanksDisagree, match="optimizer is SGD on rank 0 and Adagrad on rank 1"):
        engine.prepare(model, kind(model.parameters(), lr=0.1))
    with pytest.raises(RanksDisagree, match=r"weight of the model is \[1, 2\] float32 on rank 0 and \[1, 3\] float32"):
        engine.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RanksDisagree, match="--global-batch is 4 on rank 0 and 8 on rank 1"):
        next(iter(engine.batches(Points().train_data(), global_batch=4 * (1 + rank), grains=2)))


def test_one_process_compares_nothing() -> None:
    assert fit(Points(), epochs=1, level=0, device="cpu", progress="none", loggers=()).status == "finished"
