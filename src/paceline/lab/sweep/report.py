"""The page about a sweep: the best trial, all trials, their scores over time, and the score over each setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.paths import near
from paceline.lab.sweep.outcome import SweepResult, SweepTrial, rows, shown
from paceline.observe.report import texts
from paceline.observe.report.figure import Figure, axis, color, line
from paceline.observe.report.page import document
from paceline.observe.report.section import Section

BEST = "best.yaml"
"""File with the settings of the best trial."""
_TINTS = {"finished": color(0), "pruned": color(1), "failed": color(5), "running": color(7)}


def page(result: SweepResult, task: str, *, is_typed: bool = True, moment: str | None = None) -> str:
    """Return the page as HTML, with everything in it; `is_typed` if `paceline train` knows the task by its name."""
    counts = {status: sum(trial.status == status for trial in result.trials) for status in _TINTS}
    words = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    titles, table = rows(result)
    reasons = [f"<li>trial {trial.number}: {texts.with_code(trial.why)}</li>" for trial in result.trials if trial.why]
    failures = f"<h3>Why trials failed</h3><ul>{''.join(reasons)}</ul>" if reasons else ""
    content = [
        Section("best", "Best", _best(result, task, is_typed)),
        Section("trials", "Trials", texts.table(titles, table, first_is_head=True) + failures),
        Section("search", "Search", figures=[_history(result), *_learning(result)]),
        Section("settings", "Score over each setting", figures=_by_setting(result)),
    ]
    return document(f"sweep of {task}", f"{len(result.trials)} trials: {words or 'none'}", content, moment=moment)


def _best(result: SweepResult, task: str, is_typed: bool) -> str:
    best = result.best
    if best is None:
        return "<p>No trial has finished.</p>"
    values = ", ".join(f"`{name}` {shown(value)}" for name, value in best.settings.items())
    lines = [
        f"Trial {best.number}: {result.monitor} {best.score:.6g} with {values}.",
        f"Its run is `{near(best.folder)}`, its settings are in `{near(result.folder / BEST)}`.",
    ]
    if is_typed:
        lines.append(f"To train with them: `paceline train {task} --config {near(result.folder / BEST)}`.")
    return "".join(f"<p>{texts.with_code(text)}</p>" for text in lines)


def _history(result: SweepResult) -> Figure:
    """Scores in the order of the trials, and the best so far."""
    traces: list[dict[str, Any]] = []
    for status, tint in _TINTS.items():
        some = [trial for trial in result.trials if trial.status == status and trial.score is not None]
        if some:
            traces.append(_dots([trial.number for trial in some], some, status, tint))
    choose = min if result.mode == "min" else max
    numbers: list[int] = []
    best: list[float] = []
    for trial in result.trials:
        if trial.status == "finished" and trial.score is not None:
            numbers.append(trial.number)
            best.append(choose([*best[-1:], trial.score]))
    if numbers:
        traces.append(line(numbers, best, "best so far", color(2)))
    layout = {"xaxis": axis("trial"), "yaxis": axis(result.monitor)}
    return Figure("history", "Scores of the trials", traces, layout, may_be_log=True)


def _learning(result: SweepResult) -> list[Figure]:
    """Score of every trial over its validations."""
    best = result.best
    traces = []
    for trial in result.trials:
        points = sorted((trial.scores or {}).items())
        if points:
            is_best = best is not None and trial.number == best.number
            tint = color(2) if is_best else _TINTS[trial.status]
            numbers, scores = [at for at, _ in points], [value for _, value in points]
            trace = line(numbers, scores, f"trial {trial.number}", tint, dots=True)
            traces.append(trace if is_best else {**trace, "opacity": 0.5})
    layout = {"xaxis": axis("validation"), "yaxis": axis(result.monitor), "showlegend": False}
    about = "Trials that end before the others were ended early."
    return [Figure("learning", "Scores over time", traces, layout, about, may_be_log=True)] if traces else []


def _by_setting(result: SweepResult) -> list[Figure]:
    scored = [trial for trial in result.trials if trial.score is not None]
    names = list(dict.fromkeys(name for trial in scored for name in trial.settings))
    return [_over(name, place, scored, result.monitor) for place, name in enumerate(names)]


def _over(name: str, place: int, scored: list[SweepTrial], monitor: str) -> Figure:
    """Scores over the values of one setting; numbers that span more than a decade on a logarithmic axis."""
    values = [trial.settings.get(name) for trial in scored]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    is_number = len(numbers) == len(values)
    is_wide = is_number and min(numbers) > 0 and max(numbers) > 20 * min(numbers)
    x = numbers if is_number else [shown(value) for value in values]
    layout = {"xaxis": axis(name, type="log" if is_wide else "-"), "yaxis": axis(monitor)}
    return Figure(f"setting-{place}", name, [_dots(x, scored, name, color(0))], layout, size="small")


def _dots(x: Sequence[Any], trials: list[SweepTrial], name: str, tint: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": [trial.score for trial in trials],
        "text": [f"trial {trial.number}, {trial.status}" for trial in trials],
        "name": name,
        "marker": {"color": tint, "size": 8},
    }
