"""Curves over steps: losses, metrics, learning rate, loss scale and other notes of steps."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.language import translate
from paceline.observe.report.figure import DASHES, Figure, Trace, axis, color, line
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.series import short, smooth, thin

MOST_STAGE_NAMES = 12
"""Stages up to which their names are written into a plot."""
DOTS_UP_TO = 40
"""Curves of fewer points show each of them."""
SMOOTH_FROM = 50
"""Steps from which the loss is also shown smoothed."""
NOTES = {
    "lr": ("Learning rate", "As scheduled; parameter groups may have a factor on it."),
    "gradient_norm": ("Gradient norm", "Of all gradients together, before they are clipped."),
    "loss_scale": ("Loss scale", "What fp16 losses are multiplied with."),
    "spread": ("Spread of the ranks", "How far apart the ranks' weights were when they were averaged."),
}
"""Titles of notes; others go by their name."""


def learning(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Return all plots over steps."""
    return [loss(runs), *metrics(runs), *notes(runs), *speed(runs)]


def speed(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Plot the samples per second while steps were done; runs of earlier versions have none."""
    traces: list[Trace] = []
    for number, run in enumerate(runs):
        steps, values = _points((look.step, look.samples_per_s) for look in run.looks if look.samples_per_s is not None)
        if steps:
            traces.append(_curve(steps, values, run.name, number))
    if not traces:
        return []
    about = "Samples of all ranks per second, since the point before; without validation and checkpoints."
    layout = {
        "xaxis": _steps(),
        "yaxis": axis("samples/s", rangemode="tozero"),
        "showlegend": len(runs) > 1,
        **stage_marks(runs),
    }
    return [Figure("speed", "Throughput", traces, layout, about)]


def stage_marks(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Return what marks the ends of stages in a layout: a line at each, and the stage's name where it has room.

    Of several runs those of the first are shown, unless others have other ones.
    """
    ends = runs[0].stage_ends
    if len(ends) < 2 or any(run.stage_ends[: len(ends)] != ends[: len(run.stage_ends)] for run in runs):
        return {}
    style = {"color": "#8b949e", "width": 1, "dash": "dot"}
    shapes = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": end, "x1": end, "y0": 0, "y1": 1, "line": style}
        for _, end in ends[:-1]
    ]
    names = [
        {
            **{"text": html.escape(name), "x": (begin + end) / 2, "xref": "x", "y": 1, "yref": "paper"},
            **{"yanchor": "top", "showarrow": False, "font": {"size": 10, "color": "#8b949e"}},
        }
        for (name, end), begin in zip(ends, [0, *(end for _, end in ends)], strict=False)
    ]
    return {"shapes": shapes, "annotations": names if len(names) <= MOST_STAGE_NAMES else []}


def loss(runs: Sequence[ReportedRun]) -> Figure:
    """Plot the training loss of each step, and smoothed."""
    traces: list[Trace] = []
    lost = 0
    for number, run in enumerate(runs):
        steps, values = _points((record.step, record.loss) for record in run.steps)
        lost += sum(value is None for value in values)
        if len(values) < SMOOTH_FROM:
            traces.append(_curve(steps, values, run.name, number))
            continue
        traces.append(_curve(steps, values, run.name, number, is_faint=True))
        traces.append(_curve(steps, smooth(values, max(2, len(values) / 100)), run.name, number))
    is_smoothed = any(len(run.steps) >= SMOOTH_FROM for run in runs)
    smoothed = translate("Each step's loss over all ranks, faint; smoothed, strong.")
    about = smoothed if is_smoothed else translate("Each step's loss over all ranks.")
    if lost:
        one, many = (
            translate(" {lost} of them was not finite: a gap."),
            translate(" {lost} of them were not finite: a gap."),
        )
        about += (one if lost == 1 else many).format(lost=lost)
    kind = "log" if spans_magnitudes([value for trace in traces for value in trace["y"]]) else "linear"
    marks = stage_marks(runs)
    if marks:
        about += translate(" Dotted lines are the ends of stages.")
    layout = {"xaxis": _steps(), "yaxis": axis("loss", type=kind), "showlegend": len(runs) > 1, **marks}
    return Figure("loss", "Training loss", traces, layout, about, size="wide", may_be_log=True)


def spans_magnitudes(values: Sequence[float | None], times: float = 100.0) -> bool:
    """Return True if a linear axis would show the small ones of these values as nothing."""
    known = [value for value in values if value is not None]
    return bool(known) and min(known) > 0 and max(known) > times * min(known)


def metrics(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Plot each metric, with a curve per validation set and run."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    figures = []
    for metric in dict.fromkeys(name.rpartition("/")[2] for name in names):
        traces: list[Trace] = []
        of_metric = [name for name in names if name.rpartition("/")[2] == metric]
        for number, run in enumerate(runs):
            for place, name in enumerate(of_metric):
                steps, values = _points(
                    (record.step, record.metrics[name]) for record in run.validations if name in record.metrics
                )
                dataset = name.rpartition("/")[0]
                if steps and len(runs) == 1:
                    traces.append(_curve(steps, values, dataset, place))
                elif steps:
                    dash = DASHES[place % len(DASHES)]
                    traces.append(_curve(steps, values, f"{run.name}: {dataset}", number, dash=dash))
        form = {"tickformat": ".3~%"} if any(run.is_percent(metric) for run in runs) else {}
        layout = {"xaxis": _steps(), "yaxis": axis(metric, **form)}
        title = translate("Validation: {metric}").format(metric=metric)
        figures.append(Figure(f"metric-{metric}", title, traces, layout, may_be_log=metric == "loss"))
    return figures


def notes(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Plot the learning rate, the loss scale and all else that steps have beside their loss."""
    names = dict.fromkeys(["lr", *(name for run in runs for record in run.steps for name in record.notes)])
    figures = []
    for note in names:
        traces: list[Trace] = []
        for number, run in enumerate(runs):
            steps, values = _points(
                (record.step, record.lr if note == "lr" else record.notes[note])
                for record in run.steps
                if note == "lr" or note in record.notes
            )
            if any(value is not None for value in values):
                traces.append(_curve(steps, values, run.name, number))
        if traces:
            title, about = NOTES.get(note, (note.replace("_", " ").capitalize(), ""))
            y = axis(note.replace("_", " "), rangemode="tozero")
            layout = {"xaxis": _steps(), "yaxis": y, "showlegend": len(runs) > 1}
            figures.append(Figure(f"note-{note}", title, traces, layout, about, may_be_log=True))
    return figures


def _steps() -> dict[str, Any]:
    return axis("step", rangemode="nonnegative")


def _points(pairs: Iterable[tuple[int, float | None]]) -> tuple[list[int], list[float | None]]:
    points = list(pairs)
    return [step for step, _ in points], [short(value) for _, value in points]


def _curve(
    steps: Sequence[int],
    values: Sequence[float | None],
    name: str,
    number: int,
    *,
    is_faint: bool = False,
    dash: str = "solid",
) -> Trace:
    places = thin(values)
    x, y = [steps[place] for place in places], [short(values[place]) for place in places]
    has_dots = not is_faint and len(x) <= DOTS_UP_TO
    return line(x, y, name, color(number), dash=dash, is_faint=is_faint, dots=has_dots)
