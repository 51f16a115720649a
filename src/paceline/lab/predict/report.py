"""Section of a run's report: the curve of speed over ranks that `paceline predict` has kept, with its band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.json_text import read_json
from paceline.core.language import translate
from paceline.observe.report import texts
from paceline.observe.report.figure import Figure, Trace, axis, color, line
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.section import RecipeReport, Section

FILE = "predict.json"
"""File of a prediction in the folder of the run that it was calibrated on."""
PARTS = {
    "compute_s": "compute",
    "communication_s": "communication",
    "waiting_s": "waiting for the slowest",
    "data_s": "data",
    "other_s": "other",
}


class PredictReport(RecipeReport):
    """Predictions in reports."""

    def sections(self, runs: Sequence[ReportedRun]) -> Sequence[Section]:
        for run in runs:
            try:
                return [section(read_json(run.folder / FILE), run.name)]
            except (OSError, ValueError, LookupError, TypeError, AttributeError):  # absent, or of another form
                continue
        return ()


def section(kept: Mapping[str, Any], name: str) -> Section:
    """Return the section: speed over ranks with its band, parts of a step, and the advice."""
    rows = sorted(kept["rows"], key=lambda row: row["ranks"])
    items = "".join(f"<li>{texts.with_code(text)}</li>" for text in kept["advice"])
    source = translate("By `paceline predict`, from {name}.").format(name=name)
    text = f"<p>{texts.with_code(source)}</p><ul>{items}</ul>"
    return Section("predict", "On more ranks", text, [_speed(rows), _parts(rows)])


def _speed(rows: Sequence[Mapping[str, Any]]) -> Figure:
    ranks = [row["ranks"] for row in rows]
    low, value, high = ([row["samples_per_s"][name] for row in rows] for name in ("low", "value", "high"))
    band: Trace = {
        **line([*ranks, *reversed(ranks)], [*high, *reversed(low)], translate("nine times out of ten"), color(0)),
        **{"fill": "toself", "opacity": 0.25, "line": {"width": 0}, "hoverinfo": "skip"},
    }
    ideal = [value[0] / ranks[0] * number for number in ranks]
    traces = [
        band,
        line(ranks, value, translate("predicted"), color(0), dots=True),
        {
            **line(ranks, ideal, translate("as many times as fast as ranks"), color(7)),
            "line": {"dash": "dot", "color": color(7)},
        },
    ]
    layout = {"xaxis": axis("ranks", type="log"), "yaxis": axis("samples/s", type="log"), "showlegend": True}
    about = "Predicted samples per second over the number of ranks, with the range that holds nine times out of ten."
    return Figure("predicted-speed", "Speed on more ranks", traces, layout, about, size="wide", may_be_log=True)


def _parts(rows: Sequence[Mapping[str, Any]]) -> Figure:
    names = [f"{row['ranks']:,}" for row in rows]
    traces: list[Trace] = [
        {
            **{"type": "bar", "name": translate(words), "x": names, "y": [1e3 * row[part] for row in rows]},
            **{"marker": {"color": color(number)}},
        }
        for number, (part, words) in enumerate(PARTS.items())
    ]
    layout = {"barmode": "stack", "xaxis": axis("ranks", type="category"), "yaxis": axis("ms"), "showlegend": True}
    about = "Mean over the ranks; communication is what no computing hides."
    return Figure("predicted-parts", "Parts of a step", traces, layout, about)
