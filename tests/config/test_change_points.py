"""Values that change with steps and epochs, as users type them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.config.change_points import ChangePoint, parse_all, value_at
from paceline.config.settings import DataSettings
from paceline.train.resume import FewerSamplesThanRanks, check_batch
from paceline.train.scaling import for_ranks


def test_points_are_read() -> None:
    assert ChangePoint.parse("64@1000") == ChangePoint(64.0, step=1000)
    assert ChangePoint.parse("2.5e3@e3") == ChangePoint(2500.0, epoch=2)
    assert ChangePoint.parse("none@7") == ChangePoint(None, step=7)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (("64",), "type `64@1000`"),
        (("64:1000",), "type `64@1000`"),
        (("0@10",), "above 0"),
        (("64@e0",), "count from 1"),
        (("64@100", "128@50"), "in their order"),
        (("64@e2", "128@e2"), "in their order"),
    ],
)
def test_mistakes_are_explained(texts: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_all(texts)


def test_the_last_that_holds_counts() -> None:
    points = parse_all(("16@10", "8@e3", "32@20"))
    at = lambda epoch, step: value_at(points, 4.0, epoch, step)  # noqa: E731
    assert [at(0, 0), at(0, 9), at(0, 10), at(1, 19), at(2, 12), at(2, 19), at(2, 20), at(9, 99)] == [
        *(4.0, 4.0, 16.0, 16.0, 8.0, 8.0, 32.0, 32.0)
    ]


def test_a_batch_has_whole_samples() -> None:
    for words, why in (("none@5", "a batch has a size"), ("2.5@5", "whole numbers")):
        with pytest.raises(Exception, match=why):
            DataSettings(global_batch=4, batch_schedule=(words,))
    DataSettings(batch_cost=4.0, batch_schedule=("2.5@5",))
    with pytest.raises((ValidationError, Exception), match="dataset_distribution"):
        DataSettings(length_schedule=("4@0",), dataset_distribution="random_seed_offset")


def test_a_smaller_batch_later_is_known_at_the_start() -> None:
    check_batch(DataSettings(global_batch=8, batch_schedule=("4@10",)), 4)
    with pytest.raises(FewerSamplesThanRanks):
        check_batch(DataSettings(global_batch=8, batch_schedule=("2@10",)), 4)


def test_batches_per_device_grow_with_the_ranks() -> None:
    config, _ = for_ranks(DataSettings(batch_per_device=8, batch_schedule=("16@10", "32@e4")), 3)
    assert (config.global_batch, config.batch_schedule) == (24, ("48@10", "96@e4"))
