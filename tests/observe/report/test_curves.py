"""Curves over steps, against numbers that are known."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.report.curves import learning, loss, metrics
from tests.observe.report.made import epoch, made, step


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


def test_stages_are_marked_and_speed_and_norms_are_drawn(tmp_path: Path) -> None:
    """None of them was on the page of ce01e4b."""
    records = [step(number, 1.0, gradient_norm=2.0 + number) for number in range(4)]
    records += [epoch(number, [{"compute": 1.0}], stage=f"task <{number}>") for number in range(2)]
    records += [{"kind": "progress", "step": 1, "samples_per_s": 100.0}, {"kind": "progress", "step": 3}]
    run = made(tmp_path, records)
    figures = {figure.name: figure for figure in learning([run])}
    layout = figures["loss"].layout
    assert [shape["x0"] for shape in layout["shapes"]] == [2], "between the first and the second"
    assert [note["text"] for note in layout["annotations"]] == ["task &lt;0&gt;", "task &lt;1&gt;"]
    assert figures["note-gradient_norm"].title == "Gradient norm"
    assert figures["speed"].traces[0]["y"] == [100.0]
    old = {figure.name: figure for figure in learning([made(tmp_path, name="old")])}
    assert "speed" not in old
    assert "shapes" not in old["loss"].layout
