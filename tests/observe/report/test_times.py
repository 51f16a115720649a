"""Time by epoch and rank, and numbers of epochs, against values that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.report.times import numbers, spent
from tests.observe.report.made import epoch, made, step, usual


def test_time_is_split_by_epoch_and_rank_with_what_was_between(tmp_path: Path) -> None:
    between = [{"validation": 3.0}, {"validation": 4.0}]
    run = made(tmp_path, [*usual(), epoch(2, [{"compute": 5.0}, {"compute": 6.0}], between=between)])
    by_epoch, by_rank = spent([run])[:2]
    bars = {trace["name"]: trace for trace in by_epoch.traces}
    assert "resumed" not in by_epoch.about.lower()
    again = epoch(2, [{"compute": 5.0}], launch={"steps": 1, "seconds": 2.0})
    (figure, *_) = spent([made(tmp_path, [*usual(), again], "again")])
    assert "Resumed within epoch 3: without what was lost" in figure.about
    assert bars["validation"]["y"] == [0, 0, 0, 0, 3, 4]
    assert bars["compute"]["y"] == [7, 9, 7, 9, 5, 6]
    assert bars["data"]["x"][0] == ["epoch 1"] * 2 + ["epoch 2"] * 2 + ["epoch 3"] * 2
    shares = {trace["name"]: trace["x"] for trace in by_rank.traces}
    assert shares["communication"] == [pytest.approx(100 * 4 / 28, abs=1e-2), 0]
    assert sum(share[0] for share in shares.values()) == pytest.approx(100, abs=0.01)


def test_many_epochs_are_drawn_as_some(tmp_path: Path) -> None:
    every = [step(0, 1.0), *(epoch(number, [{"compute": float(number)}], padding=0.1) for number in range(700))]
    by_epoch, padding = spent([made(tmp_path, every)])
    assert by_epoch.traces[0]["x"][:3] == ["1", "4", "7"]
    assert by_epoch.traces[0]["y"][:3] == [0.0, 3.0, 6.0]
    assert "one epoch in 3" in by_epoch.about
    assert len(padding.traces[0]["x"]) == 700


def test_samples_have_one_name_only(tmp_path: Path) -> None:
    both = [step(0, 1.0), epoch(0, [{"compute": 1.0}], objects_per_s=7.0, rates={"utterances_per_s": 7.0})]
    assert [figure.title for figure in numbers([made(tmp_path, both)])] == ["Utterances per second"]
