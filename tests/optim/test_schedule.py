"""Every schedule against its closed form and, where they coincide, torch's own schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.config.settings import BuiltInSchedule, OptimSettings, TrainConfig
from paceline.core.errors import InvalidSetting, PacelineError
from paceline.optim.schedule import (
    SCHEDULES,
    MinLrAboveLr,
    ScheduleNeedsEnd,
    ScoresMissing,
    build,
    newbob,
    unused,
)

LR, LOW, WARMUP, TOTAL, HOLD = 0.02, 1e-4, 10, 110, 20
NEEDED: dict[str, dict[str, Any]] = {
    "exponential": {"decay_steps": 30},
    "piecewise": {"milestones": (40, 70)},
    "noam": {"model_size": 64},
}
"""Options that a schedule cannot do without."""
WITH_WARMUP = sorted(set(SCHEDULES) - {"noam"})
FALLING_TO_THE_END = ["cosine", "linear", "polynomial", "sqrt", "square"]


def settings(**values: object) -> OptimSettings:
    return OptimSettings(**{"lr": LR, **values})  # type: ignore[arg-type]


def rates(schedule: str, total: int | None = TOTAL, **values: object) -> Callable[[int], float]:
    return build(settings(schedule=schedule, **{**NEEDED.get(schedule, {}), **values}), total, scores=list)


def test_every_schedule_of_the_settings_is_known() -> None:
    assert set(SCHEDULES) == set(get_args(BuiltInSchedule))
    assert all(schedule.options <= set(OptimSettings.model_fields) for schedule in SCHEDULES.values())


@pytest.mark.parametrize("schedule", WITH_WARMUP)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 8}, {"warmup_ratio": 0.08}])
def test_warmup_is_nemos(schedule: str, warmup: dict[str, float]) -> None:
    rate = rates(schedule, 100, **warmup)
    assert [rate(step) for step in range(8)] == [LR * (step + 1) / 9 for step in range(8)]
    assert rate(8) == LR


def test_a_ratio_is_a_share_of_all_steps() -> None:
    assert rates("constant", 100, warmup_ratio=0.29)(28) == LR * 29 / 30  # 0.29 * 100 is just below 29 in binary
    assert rates("constant", 100, warmup_ratio=0.29)(29) == LR
    assert rates("constant", 100, warmup_ratio=0.0)(0) == LR


# (options, rate at s steps after the warm-up of WARMUP steps), from the references' own formulas.
CLOSED: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({}, lambda s: LR),
    "cosine": ({"min_lr": LOW}, lambda s: (LR - LOW) * 0.5 * (1 + math.cos(math.pi * s / 100)) + LOW),
    "linear": ({"min_lr": LOW}, lambda s: LR + (LOW - LR) * s / 100),
    "square": ({"min_lr": LOW}, lambda s: max(LR * ((100 - s) / 100) ** 2, LOW)),
    "sqrt": ({"min_lr": LOW}, lambda s: max(LR * ((100 - s) / 100) ** 0.5, LOW)),
    "inverse-sqrt": ({}, lambda s: LR / math.sqrt((s + 11) / 11)),
    "polynomial": (
        {"min_lr": LOW, "power": 3.0, "hold_steps": HOLD},
        lambda s: (LR - LOW) * (1 - max(0, s - 20) / 80) ** 3 + LOW,
    ),
    "exponential": (
        {"decay": 0.3, "decay_steps": 25, "hold_steps": HOLD, "min_lr": LOW},
        lambda s: max(LR * math.exp(math.log(0.3) * max(0, s - 20) / 25), LOW),
    ),
    "piecewise": (
        {"decay": 0.1, "milestones": (70, 40, 90), "min_lr": LOW},
        lambda s: LR if s < 30 else LR / 10 if s < 60 else LR / 100 if s < 80 else LOW,
    ),
    "noam": ({"model_size": 64}, lambda s: LR * 64**-0.5 * (s + 11) ** -0.5),
}


@pytest.mark.parametrize("schedule", CLOSED)
def test_closed_form(schedule: str) -> None:
    options, expected = CLOSED[schedule]
    rate = rates(schedule, warmup_steps=WARMUP, **options)
    for step in range(WARMUP, TOTAL):
        assert rate(step) == pytest.approx(expected(step - WARMUP), rel=1e-12)
    for step in (TOTAL, TOTAL + 1, TOTAL + 500):  # at the end and after it
        assert rate(step) == pytest.approx(LOW if schedule in FALLING_TO_THE_END else expected(step - WARMUP))


def test_noam_rises_to_its_own_peak() -> None:
    rate = rates("noam", None, warmup_steps=WARMUP)
    for step in range(WARMUP):
        assert rate(step) == pytest.approx(LR / 8 * (step + 1) * WARMUP**-1.5, rel=1e-12)
    assert rate(WARMUP - 1) == pytest.approx(LR / math.sqrt(64 * WARMUP)) == max(rate(step) for step in range(1000))
    assert rates("noam", None)(0) == pytest.approx(LR / 8)
    assert rates("noam", None, min_lr=1e-4)(10**6) == 1e-4


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_rises_in_the_warmup_and_never_after_it(schedule: str, warmup: int) -> None:
    rate = rates(schedule, warmup_steps=warmup)
    peak = warmup - 1 if schedule == "noam" and warmup else warmup
    values = [rate(step) for step in range(TOTAL + 20)]
    assert all(after > before for before, after in pairwise(values[: peak + 1]))
    assert all(after <= before for before, after in pairwise(values[peak:]))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_same_after_a_resume(schedule: str) -> None:
    """A schedule built anew, asked for the later steps only, gives what the first one gave there."""
    scores = [3.0, 2.0, 1.999]
    chosen = settings(schedule=schedule, warmup_ratio=0.1, **NEEDED.get(schedule, {}))
    whole = [build(chosen, TOTAL, lambda: scores)(step) for step in range(TOTAL)]
    resumed = build(chosen, TOTAL, lambda: list(scores))
    assert [resumed(step) for step in range(57, TOTAL)] == whole[57:]


TORCH: dict[str, tuple[dict[str, Any], Callable[[torch.optim.Optimizer], Any]]] = {
    "cosine": (
        {"min_lr": 0.001},
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.001),
    ),
    "linear": (
        {"min_lr": 0.001},
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001 / LR, total_iters=50),
    ),
    "polynomial": (
        {"power": 2.5},
        lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=2.5),
    ),
    "exponential": (
        {"decay": 0.97, "decay_steps": 1},
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97),
    ),
    "piecewise": (
        {"decay": 0.3, "milestones": (5, 20, 20, 41)},
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[5, 20, 20, 41], gamma=0.3),
    ),
}


@pytest.mark.parametrize("schedule", TORCH)
def test_without_warmup_as_torchs(schedule: str) -> None:
    options, make = TORCH[schedule]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = make(optimizer)
    rate = rates(schedule, 50, **options)
    for step in range(50):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 50),
    st.integers(0, 200),
    st.floats(0, 2e-4),
)
def test_never_leaves_its_range(schedule: str, warmup: int, hold: int, total: int, step: int, low: float) -> None:
    """Also where warm-up and hold are longer than the run."""
    rate = rates(schedule, total, warmup_steps=warmup, min_lr=low, hold_steps=hold)(step)
    assert 0 <= rate <= LR * (1 + 1e-12)
    if step >= warmup:
        assert rate >= low * (1 - 1e-12)


# -- newbob --------------------------------------------------------------------------------------------------------


def returnn(scores: list[float], lr: float, decay: float, threshold: float) -> float:
    """RETURNN's rule, epoch by epoch: the relative error of the last two scores above its (negative) threshold."""
    for old, new in pairwise(scores):
        if (new - old) / abs(new) > -threshold:
            lr *= decay
    return lr


@given(st.lists(st.floats(0.01, 10.0), max_size=12), st.floats(0.0, 0.2), st.floats(0.1, 0.9))
def test_newbob_is_returnns(scores: list[float], threshold: float, decay: float) -> None:
    # Where the gain is the threshold itself, rounding decides.
    assume(all(abs((old - new) / new - threshold) > 1e-9 for old, new in pairwise(scores)))
    expected = returnn(scores, 1.0, decay, threshold)
    assert newbob(scores, 1.0, decay, threshold, min_lr=0.0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([], 1.0),
        ([5.0], 1.0),
        ([5.0, 4.0, 3.0], 1.0),
        ([5.0, 4.99], 0.5),  # better, but by less than 1 %
        ([5.0, 6.0, 4.0], 0.5),
        ([5.0, 5.0, 5.0, 5.0], 0.2),  # the third time stops at min_lr
        ([0.1, 0.0], 1.0),
        ([0.0, 0.0], 0.5),
        ([-0.5, -0.6], 1.0),  # an accuracy, negated
        ([-0.6, -0.5], 0.5),
        ([5.0, math.nan], 0.5),
        ([math.nan, 5.0], 1.0),
        ([math.nan, math.nan], 0.5),
        ([5.0, math.inf, 4.0], 0.5),
    ],
)
def test_newbob_decays_when_scores_stop_improving(scores: list[float], expected: float) -> None:
    assert newbob(scores, 1.0, 0.5, 0.01, min_lr=0.2) == expected


def test_newbob_follows_the_scores_as_they_grow() -> None:
    scores: list[float] = []
    rate = build(settings(schedule="newbob", decay=0.5, newbob_threshold=0.1, warmup_steps=3), None, lambda: scores)
    seen = []
    for step, score in enumerate([9.0, 9.0, 9.0, 8.0, 7.9, 7.9, 3.0]):
        seen.append(rate(step))
        scores.append(score)
    # Warm-up; then as of the scores before each step: two without gain, one with, two without.
    assert seen == [LR / 4, LR / 2, LR * 3 / 4, LR / 4, LR / 4, LR / 8, LR / 16]
    scores.clear()
    assert rate(7) == LR


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_bad_settings_are_named() -> None:
    with pytest.raises(MinLrAboveLr, match=r"min_lr 0\.1 is above lr 0\.02"):
        rates("cosine", min_lr=0.1)
    with pytest.raises(MinLrAboveLr, match=r"min_lr 0\.01 is above Noam's highest rate 0\.0025"):
        rates("noam", min_lr=0.01)
    with pytest.raises(ScheduleNeedsEnd, match=r"warmup_ratio"):
        rates("constant", None, warmup_ratio=0.1)
    with pytest.raises(PacelineError, match=r"set warmup_steps or warmup_ratio, not both"):
        rates("cosine", warmup_steps=5, warmup_ratio=0.1)
    with pytest.raises(ScoresMissing, match="newbob"):
        build(settings(schedule="newbob"), 100)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_only_those_that_fall_to_the_end_need_one(schedule: str) -> None:
    if schedule in FALLING_TO_THE_END:
        with pytest.raises(ScheduleNeedsEnd, match=f"schedule '{schedule}' needs to know how many steps"):
            rates(schedule, None)
    else:
        assert 0 < rates(schedule, None, warmup_steps=1)(10**3) <= LR


@pytest.mark.parametrize("schedule", NEEDED)
def test_a_missing_option_is_named_with_what_to_type(schedule: str) -> None:
    (option,) = NEEDED[schedule]
    with pytest.raises(InvalidSetting, match=f"schedule '{schedule}' needs `{option}`") as caught:
        build(settings(schedule=schedule), 100)
    assert f"--{option.replace('_', '-')} " in caught.value.hint
    assert isinstance(caught.value, PacelineError)


def test_options_without_effect_are_listed() -> None:
    assert unused(settings(schedule="cosine", min_lr=0.001, warmup_steps=5)) == []
    assert unused(settings(schedule="cosine", power=2.0, milestones=(5,))) == ["power", "milestones"]
    assert unused(settings(schedule="polynomial", power=2.0, hold_steps=5, decay=0.9)) == ["decay"]
    assert unused(settings(min_lr=0.001, model_size=512)) == ["min_lr", "model_size"]
    assert unused(TrainConfig(epochs=1, schedule="newbob", decay=0.7, newbob_threshold=0.1)) == []
