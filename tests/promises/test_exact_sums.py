"""`sums: exact`: the same bits on any number of ranks, equal to one process that adds the tree by hand.

A sample of kinds and numbers of ranks; `--long` runs all of them for 50 steps, also on 8 ranks. One thread per process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.settings import TrainConfig
from paceline.observe.journal import read
from paceline.train import loop
from paceline.train.resume import settings_changed
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.exact import Case, by_hand, digest, train
from tests.train.ragged import RaggedTask

CASES = {
    "conv": Case("conv", {"level": 0, "clip_norm": 0.5, "ema": 0.9}, {"optimizer": "sgd"}),
    "conv, bf16": Case("conv", {"level": 0}, {"optimizer": "adamw"}, bf16=True),
    "conv, fp64": Case("conv", {"precision": "fp64", "clip_norm": 0.5}, {"optimizer": "lamb"}),
    "conv, 7 grains": Case("conv", {"level": 0, "ema": 0.9}, {"optimizer": "adamw"}, grains=7),
    "lstm": Case("lstm", {"level": 0, "clip_norm": 0.5, "ema": 0.9}, {"optimizer": "lamb"}),
    "lstm, bf16": Case("lstm", {"level": 0}, {"optimizer": "sgd", "larc": "scale"}, bf16=True),
    "lstm, fp64": Case("lstm", {"precision": "fp64"}, {"optimizer": "novograd"}),
    "transformer": Case("transformer", {"level": 0, "ema": 0.9}, {"optimizer": "sgd", "larc": "clip"}),
    "transformer, bf16": Case("transformer", {"level": 0, "clip_norm": 0.5}, {"optimizer": "lamb"}, bf16=True),
    "transformer, muon": Case(
        "transformer", {"level": 0, "clip_norm": 0.5, "ema": 0.9}, {"optimizer": "muon", "weight_decay": 0.1}
    ),
    "lstm, muon": Case("lstm", {"level": 0}, {"optimizer": "muon", "muon_dtype": "bf16", "adamw_lr": 0.001}),
    "transformer, fp64": Case("transformer", {"precision": "fp64", "ema": 0.9}, {"optimizer": "adamw"}),
}
SAMPLE = [("conv", 1), ("conv", 2), ("conv", 3), ("conv, 7 grains", 4), ("lstm", 4), ("lstm, fp64", 2)]
SAMPLE += [("transformer", 3), ("transformer, bf16", 2), ("transformer, muon", 2)]
SHARDED = [("conv", "full", 2), ("lstm", "full", 4), ("transformer", "full", 3), ("conv, 7 grains", "node", 4)]
SHARDED += [("transformer, muon", "full", 3), ("lstm, muon", "full", 4)]
SHARDED += [("conv, fp64", "full", 4)]  # LAMB on biases of 8 numbers, two on each rank
LONG_STEPS = 50


@cache
def reference(case_name: str, steps: int) -> dict[str, str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return by_hand(replace(CASES[case_name], steps=steps))
    finally:
        torch.set_num_threads(threads)


@cache
def has_bf16_lstm() -> bool:
    """Return True if oneDNN computes an LSTM in bf16 on this CPU."""
    x = torch.zeros(2, 3, 4, dtype=torch.float32, device="cpu")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4, device="cpu", dtype=torch.float32)(x)[0].sum().backward()
    except RuntimeError:
        return False
    return True


def check(name: str, size: int, steps: int, more: dict[str, Any], machines: int = 1) -> None:
    if name == "lstm, bf16" and not has_bf16_lstm():
        pytest.skip("oneDNN has no LSTM in bf16 on this CPU")
    case = replace(CASES[name], steps=steps, settings={**CASES[name].settings, **more})
    results = run_ranks(size, train, case, machines=machines, timeout_s=300.0)
    expected = reference(name, steps)
    for rank, result in enumerate(results if not more else results[:1]):  # of shards, the first rank has whole ones
        differ = [key for key, value in expected.items() if result.get(key) != value]
        assert not differ, f"rank {rank} of {size}: {len(differ)} of {len(expected)} differ: {differ[:5]}"


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, case in CASES.items() for size in (1, 2, 3, 4, 8) if size <= case.grains]
)
def test_same_bits_on_any_number_of_ranks(name: str, size: int, request: pytest.FixtureRequest) -> None:
    is_long = request.config.getoption("--long")
    if not is_long and (name, size) not in SAMPLE:
        pytest.skip("with --long")
    check(name, size, LONG_STEPS if is_long else CASES[name].steps, {})


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [(name, kind, size) for name in CASES for kind, size in (("full", 2), ("full", 3), ("full", 4), ("node", 4))],
)
def test_same_bits_of_shards(name: str, kind: str, size: int, request: pytest.FixtureRequest) -> None:
    is_long = request.config.getoption("--long")
    if not is_long and (name, kind, size) not in SHARDED:
        pytest.skip("with --long")
    steps = LONG_STEPS if is_long else CASES[name].steps
    check(name, size, steps, {"shard": kind}, machines=2 if kind == "node" else 1)


def fit(link: Link, folder: str, settings: dict[str, Any]) -> dict[str, str]:
    config = TrainConfig(
        **{
            **{"steps": 20, "grains": 4, "global_batch": 24, "lr": 0.05, "seed": 3, "level": 0, "val_every_steps": 10},
            **{"optimizer": "sgd", "clip_norm": 1.0, "out": f"{folder}/{link.world.size}"},
            **settings,
        }
    )
    trainer = open_run(RaggedTask(), config, link)
    loop.train(trainer)
    with trainer.stepper.whole_statistics():
        return {name: digest(tensor) for name, tensor in trainer.stepper.model.state_dict().items()}


def lines_of(folder: str, size: int) -> list[dict[str, Any]]:
    """Losses, norms and metrics of a run's journal."""
    numbers = ("kind", "step", "loss", "gradient_norm", "learning_rate", "metrics", "count")
    records = read(Path(folder) / str(size) / "metrics.jsonl")
    return [{key: record[key] for key in numbers if key in record} for record in records]


def test_a_whole_run_with_lengths(tmp_path: Any) -> None:
    """Ragged lengths (grains of uneven cost), token counts, last steps of fewer grains, validation: the same lines."""
    states = {size: run_ranks(size, fit, str(tmp_path), {}) for size in (1, 2, 3, 4)}
    expected, lines = states[1][0], lines_of(str(tmp_path), 1)
    assert len(lines) >= 20
    for size in (2, 3, 4):
        assert all(state == expected for state in states[size]), size
        assert lines_of(str(tmp_path), size) == lines, size


def test_fast_is_asked_for_by_name(tmp_path: Any) -> None:
    """The order matters: three grains or more, added one after the other, give other bits."""
    (exact,) = run_ranks(1, fit, str(tmp_path / "exact"), {"sums": "exact"})
    (fast,) = run_ranks(1, fit, str(tmp_path / "fast"), {"sums": "fast"})
    assert exact != fast


def test_a_run_goes_on_as_it_began() -> None:
    """A run from before there was a choice added fast; the setting is compared only if it is typed."""
    now = TrainConfig(steps=1)
    old = {key: value for key, value in now.model_dump(mode="json").items() if key != "sums"}
    for stored in ({}, {"sums": "exact"}, {"sums": "fast"}):
        assert settings_changed(old | stored, now) == {}
    fast, exact = TrainConfig(steps=1, sums="fast"), TrainConfig(steps=1, sums="exact")
    assert settings_changed(old, fast) == {}
    assert settings_changed(old, exact) == {"sums": ("fast", "exact")}
    assert settings_changed(old | {"sums": "exact"}, fast) == {"sums": ("exact", "fast")}
