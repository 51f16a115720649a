"""Curves over steps, against numbers that are known."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.report.curves import loss, metrics
from tests.observe.report.made import made, step


def test_losses_that_are_not_finite_are_gaps_and_said(tmp_path: Path) -> None:
    run = made(tmp_path, [step(0, 2.0), step(1, None), step(2, 1.0)])
    figure = loss([run])
    assert figure.traces[0]["y"] == [2.0, None, 1.0]
    assert "1 of them was not finite" in figure.about


def test_a_log_axis_where_small_losses_would_vanish(tmp_path: Path) -> None:
    far = loss([made(tmp_path, [step(0, 500.0), step(1, 0.5)], "far")])
    near = loss([made(tmp_path, [step(0, 5.0), step(1, 0.5)], "near")])
    assert (far.layout["yaxis"]["type"], near.layout["yaxis"]["type"]) == ("log", "linear")


def test_every_metric_has_a_plot_and_every_set_a_curve(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in metrics([made(tmp_path)])}
    assert figures.keys() == {"metric-wer", "metric-loss"}
    (curve,) = figures["metric-wer"].traces
    assert (curve["name"], curve["x"], curve["y"]) == ("dev", [1, 3], [0.5, 0.25])
