"""The first loss scale of an fp16 run is found on its first batch: no step is lost, nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.data.grain import Grain
from paceline.train.checkpoint import reader
from paceline.train.loop import train
from paceline.train.run import Run
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.small import BATCH, FEATURES, NUM_SAMPLES, SmallTask, assert_same, opened, points, weights


class Steep(SmallTask):
    """Its gradients overflow in fp16 above a small scale, and there is a batch norm to be left alone."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def train_data(self) -> Any:
        return points(2 * NUM_SAMPLES // BATCH * BATCH, seed=1)

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        out = model(grain.x).squeeze(1).float()
        return 1000.0 * out.sum() + 0.0 * grain.y.sum(), len(grain)


class Mixes(Steep):
    """Changes its grain in place, as Mixup does."""

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        grain.x.mul_(0.5).add_(grain.x.flip(0).mul(0.5))
        return super().loss(model, grain)


def test_a_loss_that_changes_its_grain_is_tried_on_copies() -> None:
    """The search ran the first batch several times, and Mixup mixed it as often."""
    settings = {"precision": "fp16", "level": "auto", "lr": 1e-6, "steps": 2}
    found = opened(Mixes(), None, None, **settings)
    train(found)
    constant = opened(Mixes(), None, None, loss_scale=found.stepper.scale.current(), **settings)
    train(constant)
    assert_same(weights(found), weights(constant))


def skipped(run: Run) -> int:
    return run.stepper.skips.state()[0]


def steep(out: Path | None, link: Link | None = None, **settings: Any) -> Run:
    plain = {"precision": "fp16", "level": "auto", "lr": 1e-6, "steps": 5}
    return opened(Steep(), out, link, **{**plain, **settings})


def largest(**settings: Any) -> float:
    """Largest power of two that does not overflow as a constant scale, by trying them all."""
    for power in range(14, -1, -1):
        run = steep(None, **{**settings, "loss_scale": 2.0**power, "steps": 1})
        train(run)
        if skipped(run) == 0:
            return 2.0**power
    raise AssertionError


@pytest.mark.parametrize("settings", [{}, {"grains": 2}, {"clip_norm": 1.0}], ids=["plain", "grains", "clipped"])
def test_no_step_is_skipped_and_the_rest_is_as_with_the_same_constant(settings: dict[str, Any]) -> None:
    first = largest(**settings) / 4
    assert 1.0 < first < 2.0**12
    found = steep(None, **settings)
    train(found)
    assert found.stepper.scale.current() == first
    assert skipped(found) == 0
    constant = steep(None, loss_scale=first, **settings)
    train(constant)
    assert_same(weights(found), weights(constant))  # running statistics, too


def test_a_resumed_run_does_not_search(tmp_path: Path) -> None:
    whole = steep(tmp_path / "whole", steps=6)
    train(whole)
    train(steep(tmp_path / "parts", steps=3))
    checkpoint = reader.newest(tmp_path / "parts/checkpoints").checkpoint
    assert checkpoint is not None
    assert checkpoint.parts["scale"].keys() == {"scale", "clean_steps"}
    again = steep(tmp_path / "parts", steps=6, resume="auto", allow_change=True)
    assert again.stepper.scale.is_found
    train(again)
    assert again.stepper.scale.state_dict() == whole.stepper.scale.state_dict()
    assert_same(weights(again), weights(whole))


def on_ranks(link: Link, settings: dict[str, Any]) -> tuple[float, int, dict[str, torch.Tensor]]:
    run = steep(None, link, grains=2, **settings)
    train(run)
    return run.stepper.scale.current(), skipped(run), weights(run)


@pytest.mark.parametrize("settings", [{}, {"reduce": "param", "sync_step": 2}], ids=["grad", "param"])
def test_ranks_find_the_same_scale(settings: dict[str, Any]) -> None:
    alone = steep(None, grains=2)
    train(alone)
    for scale, num_skipped, found in run_ranks(2, on_ranks, settings):
        assert num_skipped == 0
        if not settings:  # ranks that step apart divide by their own count, and each finds its own
            assert scale == alone.stepper.scale.current()
            for name, tensor in weights(alone).items():
                assert torch.allclose(tensor, found[name], rtol=1e-5, atol=1e-7), name


def test_where_every_scale_overflows_steps_are_skipped_as_ever() -> None:
    class Hopeless(Steep):
        def loss(self, model: nn.Module, grain: Grain) -> Any:
            total, count = super().loss(model, grain)
            return 1000.0 * total, count

    run = opened(Hopeless(), None, precision="fp16", level="auto", steps=3)
    train(run)
    assert (run.stepper.scale.current(), skipped(run)) == (1.0, 3)
