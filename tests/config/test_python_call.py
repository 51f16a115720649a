"""Mistakes in calls from Python: all at once, with nearest names, as one of our own exceptions.

On ce01e4b `fit(epoch=1)` and `Engine(level=7)` raised pydantic's own ValidationError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline


class Hidden(paceline.TrainConfig):
    hidden: int = 3


class Small(paceline.Task):
    Settings = Hidden


def ask_for_batches() -> None:
    engine = paceline.Engine(level=0)
    try:
        engine.batches([1], globl_batch=2)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("call", "lines", "hint"),
    [
        (lambda: paceline.fit(Small(), epoch=1), ["epoch 1: there is no such setting"], "did you mean epochs?"),
        (
            lambda: paceline.fit(Small(), epochs=1, hiden=2),
            ["hiden 2: there is no such setting"],
            "did you mean hidden?",
        ),
        (lambda: paceline.Engine(level=7), ["level 7: must be one of auto, 0, 1, 2, 3 or 4"], "docs/options.md"),
        (
            lambda: paceline.fit(Small(), epochs=1, batch_size=4, lr=-1.0, schedule="cosin", warmup_steps=-2),
            [
                "4 mistakes in the settings of `paceline.fit`",
                "batch_size 4: there is no such setting",
                "did you mean global_batch?",
                "lr -1.0: must be above 0",
                "did you mean cosine?",
                "warmup_steps -2: must be at least 0",
            ],
            "docs/options.md",
        ),
        (
            lambda: paceline.fit(Small(), epochs=1, warmup_steps=3, warmup_ratio=0.1, lr="high"),
            ["lr 'high': must be a number", "set warmup_steps or warmup_ratio, not both"],
            "docs/options.md",
        ),
        (lambda: paceline.fit(Small()), ["set epochs or steps: how long to train"], ""),
        (ask_for_batches, ["globl_batch 2: there is no such setting"], "did you mean global_batch?"),
    ],
    ids=["unknown", "own", "value", "many", "across", "missing", "batches"],
)
def test_mistakes_are_ours_and_all_at_once(call: Callable[[], Any], lines: list[str], hint: str) -> None:
    with pytest.raises(paceline.PacelineError) as error:
        call()
    assert [line for line in lines if line not in str(error.value)] == []
    assert hint in error.value.hint
    assert isinstance(error.value, ValueError)  # what pydantic's own error is, too


def engine_of(call: Callable[[paceline.Engine], Any]) -> Callable[[], Any]:
    def run() -> None:
        with paceline.Engine(level=0, device="cpu") as engine:
            call(engine)

    return run


def step_with_samples_of_elsewhere(engine: paceline.Engine) -> None:
    model = torch.nn.Linear(2, 1)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.step(lambda grain: (model(grain).sum(), 1), (torch.ones(3, 2), torch.ones(3)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (lambda: paceline.fit(Small, epochs=1), "the class Small, not a task", "make one: `Small()`"),
        (lambda: paceline.fit("digits", epochs=1), "is 'digits', not a task", "`paceline train digits`"),
        (lambda: paceline.fit(torch.nn.Linear(1, 1), epochs=1), "of the type Linear", "subclass `paceline.Task`"),
        (lambda: paceline.fit(Small(), {"epochs": 1}), "of the type dict, not Hidden", "`**settings`"),
        (
            lambda: paceline.fit(Small(), paceline.TrainConfig(epochs=1)),
            "of the type TrainConfig, not Hidden",
            "Hidden",
        ),
        (lambda: paceline.fit(Small(), Hidden(epochs=1), lr=0.1), "`config` and also `lr`", "leave it out"),
        (
            lambda: paceline.fit(Small(), epochs=1, watchers=paceline.Callback()),
            "callbacks must be given as a list, not as an object of",
            "a list",
        ),
        (
            lambda: paceline.fit(Small(), epochs=1, watchers=None),
            "callbacks must be given as a list, not as None",
            "a list",
        ),
        (
            lambda: paceline.fit(Small(), epochs=1, watchers=[paceline.Callback]),
            "the class Callback is no",
            "paceline.Callback",
        ),
        (lambda: paceline.Engine(paceline.TrainConfig(epochs=1), level=1), "`config` and also `level`", "leave it out"),
        (engine_of(lambda engine: paceline.Engine(link=engine)), "of the type Engine, not a link", "`link=other.link`"),
        (
            engine_of(lambda engine: engine.prepare(torch.nn.Linear(1, 1), torch.optim.SGD)),
            "the class SGD",
            "engine.prepare",
        ),
        (engine_of(step_with_samples_of_elsewhere), "of the type tuple", "engine.batches"),
        (lambda: paceline.load(None), "None is no path of a run", "run.json"),
        (lambda: paceline.load("run", task=Small), "`task` of paceline.load is the class Small", "make one: `Small()`"),
        (lambda: paceline.load("run", checkpoint=3), "checkpoint 3: must be best, last, a path", ""),
        (lambda: paceline.load("run", device="gpu"), "device 'gpu': must be one of auto, cpu or cuda", ""),
        (lambda: paceline.sweep(Small(), {"lr": [0.1, 0.2]}), "of the type Small", "the class itself"),
        (lambda: paceline.sweep(Small, None), "search None: must be a mapping", '{"lr"'),
        (lambda: paceline.sweep(Small, {"lr": [0.1, 0.2]}, trials="3"), "trials '3': must be a whole number", ""),
    ],
)
def test_objects_of_another_kind_are_named(call: Callable[[], Any], message: str, hint: str) -> None:
    """Before, a class instead of a task and the like were errors of Python's somewhere inside; settings beside a config
    were passed over in silence."""
    with pytest.raises(paceline.PacelineError) as error:
        call()
    assert message in str(error.value)
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": math.inf}, "lr inf: must be a finite number"),
        ({"clip_norm": math.nan}, "clip_norm nan: must be"),
        ({"seed": 2**70}, "seed 1180591620717411303424: must fit into 64 bits"),
    ],
)
def test_numbers_that_nothing_can_be_done_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(paceline.PacelineError, match=re.escape(message)):
        Hidden(epochs=1, **settings)


def test_a_dtype_of_torch_is_a_precision() -> None:
    assert Hidden(epochs=1, precision=torch.bfloat16).level == 2
    assert Hidden(epochs=1, precision=torch.float16).precision == "fp16"
    assert Hidden(epochs=1, device=torch.device("cpu")).device == "cpu"


def test_other_names_are_accepted_as_everywhere() -> None:
    engine = paceline.Engine(level=0, reduce_type="grad")
    assert engine.config.reduce == "grad"
    engine.close()
