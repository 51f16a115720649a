"""Kernels that are slow on a device: found there alone, with what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.observe.records import DeviceSteps, EpochRecord, Way
from paceline.speed.verdicts import slow_depthwise


def record(device: str = "NVIDIA H200", **way: object) -> EpochRecord:
    return EpochRecord(
        device=DeviceSteps(device), way=Way.from_json({"level": 2, "has_bf16": True, "depthwise": True, **way})
    )


@pytest.mark.parametrize("level", [2, 3])
def test_a_precision_slower_than_another(level: int) -> None:
    (found,) = slow_depthwise(record(level=level))
    assert found.line == (
        "depthwise convolutions in bf16 are slow on NVIDIA H200: `--precision fp16` was 2.4 times as fast for QuartzNet"
    )
    assert not list(slow_depthwise(record(level=level, precision="fp16")))
    assert not list(slow_depthwise(record(level=level, depthwise=False)))
    assert not list(slow_depthwise(record("NVIDIA A100", level=level))), "not measured there"
    assert not list(slow_depthwise(replace(record(), device=None)))


def test_a_level_that_the_run_can_have_is_advised() -> None:
    (found,) = slow_depthwise(record(highest_level=4))
    assert found.advice == (
        "`-O4` has its own kernels for them, and `--precision fp16` was 2.4 times as fast for QuartzNet"
    )
