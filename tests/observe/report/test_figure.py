"""Figures against plotly's own rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe.report.curves import learning
from paceline.observe.report.times import spent
from tests.observe.report.made import epoch, made, step


def test_plotly_accepts_every_figure(tmp_path: Path) -> None:
    """Its Python package refuses unknown names and wrong values."""
    objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    many = [step(number, 1.0 / (number + 1), loss_scale=2.0**number) for number in range(60)]
    rates = {"rates": {"tokens_per_s": 5.0}, "memory": [{"host_bytes": 2**30, "device_bytes": None}], "mfu": 0.5}
    long = [step(0, 1.0), *(epoch(number, [{"data": 1.0, "new": 2.0}] * 40, **rates) for number in range(3))]
    runs = [made(tmp_path), made(tmp_path, many, "many"), made(tmp_path, long, "long")]
    figures = [*learning(runs), *spent(runs)]
    assert len({figure.name for figure in figures}) == len(figures) >= 11
    for figure in figures:
        described = figure.as_json()
        objects.Figure(data=described["data"], layout=described["layout"])
        json.dumps(described, allow_nan=False)
