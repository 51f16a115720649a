"""Schedules against NeMo's formulas and torch's own schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.settings import OptimSettings
from paceline.optim.schedule import SCHEDULES, MinLrAboveLr, ScheduleNeedsEnd, build


def settings(**values: object) -> OptimSettings:
    return OptimSettings.model_validate({"lr": 0.02, **values})


def test_every_schedule_of_the_settings_is_known() -> None:
    assert set(SCHEDULES) == set(OptimSettings.model_fields["schedule"].annotation.__args__)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_nemos(schedule: str) -> None:
    rate = build(settings(schedule=schedule, warmup_steps=8), 100)
    assert [rate(step) for step in range(8)] == [0.02 * (step + 1) / 9 for step in range(8)]
    assert rate(8) == 0.02


def test_cosine_and_linear_are_nemos_after_warmup() -> None:
    lr, low, warmup, total = 0.02, 1e-4, 10, 110
    cosine = build(settings(schedule="cosine", min_lr=low, warmup_steps=warmup), total)
    linear = build(settings(schedule="linear", min_lr=low, warmup_steps=warmup), total)
    for step in range(warmup, total):
        part = (step - warmup) / (total - warmup)
        assert cosine(step) == pytest.approx((lr - low) * 0.5 * (1 + math.cos(math.pi * part)) + low, rel=1e-14)
        assert linear(step) == pytest.approx((lr - low) * (1 - part) + low, rel=1e-14)
    assert cosine(total) == linear(total) == cosine(total + 50) == low


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_without_warmup_as_torchs(schedule: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.02)
    if schedule == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.001)
    else:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001 / 0.02, total_iters=50)
    rate = build(settings(schedule=schedule, min_lr=0.001), 50)
    for step in range(50):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(0, 60), st.integers(1, 50), st.integers(0, 200), st.floats(0, 0.02)
)
def test_never_leaves_its_range(schedule: str, warmup: int, total: int, step: int, low: float) -> None:
    rate = build(settings(schedule=schedule, warmup_steps=warmup, min_lr=low), total)(step)
    assert 0 <= rate <= 0.02 * (1 + 1e-12)
    if step >= warmup:
        assert rate >= low * (1 - 1e-12)


def test_bad_settings_are_named() -> None:
    with pytest.raises(MinLrAboveLr, match=r"min_lr 0\.1 is above lr 0\.02"):
        build(settings(schedule="cosine", min_lr=0.1), 10)
    with pytest.raises(ScheduleNeedsEnd, match="linear"):
        build(settings(schedule="linear"), None)
    assert build(settings(warmup_steps=1), None)(10**6) == 0.02
