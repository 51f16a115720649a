"""Mistakes in calls from Python: all at once, with nearest names, as one of our own exceptions.

On ce01e4b `fit(epoch=1)` and `Engine(level=7)` raised pydantic's own ValidationError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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


def test_other_names_are_accepted_as_everywhere() -> None:
    engine = paceline.Engine(level=0, reduce_type="grad")
    assert engine.config.reduce == "grad"
    engine.close()
