"""Page about a sweep: the best trial, all trials, and optuna's plots."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from paceline.core.paths import near
from paceline.lab.sweep.outcome import SweepResult, rows, shown
from paceline.lab.sweep.study import Study, require_optuna
from paceline.observe.report import texts
from paceline.observe.report.figure import Figure
from paceline.observe.report.page import PlotlyMissing, document
from paceline.observe.report.section import Section

BEST = "best.yaml"
"""File with the settings of the best trial."""


def page(result: SweepResult, study: Study, task: str, *, is_typed: bool = True) -> str:
    """Return the page as HTML, with everything in it; `is_typed` if `paceline train` knows the task by its name."""
    if find_spec("plotly") is None:
        raise PlotlyMissing
    statuses = [trial.status for trial in result.trials]
    words = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    titles, table = rows(result)
    reasons = [f"<li>trial {trial.number}: {texts.with_code(trial.why)}</li>" for trial in result.trials if trial.why]
    failures = f"<h3>Why trials failed</h3><ul>{''.join(reasons)}</ul>" if reasons else ""
    content = [
        Section("best", "Best", _best(result, task, is_typed)),
        Section("trials", "Trials", texts.table(titles, table, first_is_head=True) + failures),
        Section("search", "Search", figures=_scores(result, study)),
        Section("settings", "Score over each setting", figures=_settings(result, study)),
    ]
    return document(f"sweep of {task}", f"{len(result.trials)} trials: {words or 'none'}", content)


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


def _scores(result: SweepResult, study: Study) -> list[Figure]:
    if result.best is None:
        return []
    draw = require_optuna().visualization
    history = draw.plot_optimization_history(study.optuna, target_name=result.monitor)
    learning = draw.plot_intermediate_values(study.optuna)
    return [
        _figure("history", "Scores of the trials", history, may_be_log=True),
        _figure("learning", "Scores over the validations", learning, may_be_log=True),
    ]


def _settings(result: SweepResult, study: Study) -> list[Figure]:
    figures = []
    for number, name in enumerate(() if result.best is None else result.best.settings):
        plot = require_optuna().visualization.plot_slice(study.optuna, [name], target_name=result.monitor)
        plot.update_traces(marker_showscale=False)  # the colour is the trial's number
        figures.append(_figure(f"setting-{number}", name, plot, size="small"))
    return figures


def _figure(name: str, title: str, plot: Any, **options: Any) -> Figure:
    """Return a plot of plotly in the style of the page."""
    values = json.loads(plot.to_json())
    layout = {key: value for key, value in values["layout"].items() if key not in ("template", "title")}
    return Figure(name, title, values["data"], layout, **options)
