"""Plot of the page: plotly's own description of it, as plain values, with title and explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.core.language import translate

Trace = dict[str, Any]

COLORS = ("#3d7bfd", "#f0883e", "#1fae84", "#c957b1", "#8d6ff0", "#e0566b", "#3aa6c2", "#a89034")
"""Colours of runs, sets and metrics, different on white and on black."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Line styles of the sets of several runs, whose colour is the run's."""
PHASE_COLORS = {
    "data": "#f0883e",
    "transfer": "#e8c547",
    "compute": "#3d7bfd",
    "optimizer": "#1fae84",
    "communication": "#e0566b",
    "validation": "#8d6ff0",
    "checkpoint": "#c957b1",
    "logging": "#3aa6c2",
    "setup": "#a89034",
    "other": "#8b949e",
}
HEIGHT, SMALL_HEIGHT = 320, 210


@dataclass(frozen=True)
class Figure:
    """One plot. `layout` has what is special about it; fonts, colours and margins are the page's."""

    name: str
    """Unique on the page, for links."""
    title: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    """One sentence below the title."""
    size: Literal["small", "half", "wide"] = "half"
    """Of the page's width: a third, a half or all of it; on a phone always all."""
    min_width: int = 0
    """Pixels below which nothing of it can be read: on a phone it is then moved sideways."""
    may_be_log: bool = False
    """There is a button for a logarithmic axis."""

    @property
    def height(self) -> int:
        return int(self.layout.get("height", SMALL_HEIGHT if self.size == "small" else HEIGHT))

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "data": self.traces, "layout": {**self.layout, "height": self.height}}


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def line(
    x: Sequence[Any],
    y: Sequence[float | None],
    name: str,
    tint: str,
    *,
    dash: str = "solid",
    is_faint: bool = False,
    dots: bool = False,
) -> Trace:
    """Return a curve. Where it has few points they are marked, so that one alone is visible."""
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if dots or len(x) < 2 else "lines",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": tint, "width": 1 if is_faint else 2, "dash": dash},
    }
    if is_faint:
        trace |= {"opacity": 0.35, "showlegend": False, "hoverinfo": "skip"}
    return trace


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": translate(title)}, **more}
