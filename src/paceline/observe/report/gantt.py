"""Gantt chart of a timeline: which phase each rank was in, on one time axis."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from paceline.core.language import translate
from paceline.observe.report.figure import PHASE_COLORS, Figure, Trace, axis
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.series import short
from paceline.observe.timeline import trace

MOST_SPANS = 4000
"""Spans of one plot; more steps are for Perfetto."""
MOST_BYTES = 40_000_000
"""Size up to which a timeline is read for its phases."""


def gantts(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Return one plot per timeline that can be read."""
    figures: list[Figure] = []
    for run in runs:
        for path in run.timelines:
            spans = _phases(path)
            if spans:
                of_run = f": {run.name}" if len(runs) > 1 else ""
                figures.append(_figure(path, spans[:MOST_SPANS], of_run, f"timeline-{len(figures)}"))
    return figures


def _phases(path: Path) -> list[trace.Event]:
    """Read our own events, in the order of time."""
    try:
        events = trace.read(path)["traceEvents"] if path.stat().st_size <= MOST_BYTES else []
    except (OSError, EOFError, ValueError, KeyError, zlib.error):  # cut short, or not ours
        return []
    ours = [event for event in events if event.get("cat") == trace.PHASE and event["dur"] > 0]
    return sorted(ours, key=lambda event: float(event["ts"]))


def _figure(path: Path, spans: Sequence[trace.Event], of_run: str, name: str) -> Figure:
    ranks = sorted({trace.rank_of(span) for span in spans})
    used = {span["name"] for span in spans}
    traces: list[Trace] = []
    for phase in [*(phase for phase in PHASE_COLORS if phase in used), *sorted(used - PHASE_COLORS.keys())]:
        in_phase = [span for span in spans if span["name"] == phase]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": translate(phase),
                "base": [short(span["ts"] / 1e3, 7) for span in in_phase],
                "x": [short(span["dur"] / 1e3) for span in in_phase],
                "y": [f"rank {trace.rank_of(span)}" for span in in_phase],
                "marker": {"color": PHASE_COLORS.get(phase, "#8b949e")},
                "hovertemplate": f"{translate(phase)} %{{x:.3g}} ms<extra></extra>",
            }
        )
    layout = {
        "barmode": "overlay",
        "bargap": 0.35,
        "xaxis": axis("ms"),
        "yaxis": {"categoryorder": "array", "categoryarray": [f"rank {rank}" for rank in reversed(ranks)]},
        "height": max(220, 130 + 30 * len(ranks)),
    }
    about = translate("What each rank did, on one time axis, from profile/{file}; Perfetto shows each operator in it.")
    steps = path.name.removesuffix(".json.gz").replace("steps-", "steps ").replace("-", " to ")
    title = translate("Timeline of {steps}").format(steps=steps) + of_run
    return Figure(name, title, traces, layout, about.format(file=path.name), size="wide")
