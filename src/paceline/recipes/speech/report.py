"""Speech recognition in reports: error rates, kinds of errors, worst utterances and error rates by speaker."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.core.language import translate
from paceline.observe.report.figure import Figure, Trace, axis, line
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.samples import marked
from paceline.observe.report.section import RecipeReport, Section
from paceline.observe.report.series import short, thin
from paceline.observe.report.texts import escape, table
from paceline.observe.typed_json import is_number
from paceline.recipes.speech.word_errors.file import ERRORS, Analysis, read_analyses

KINDS = {"substitutions": "#3d7bfd", "deletions": "#f0883e", "insertions": "#1fae84"}
MOST_BYTES = 4_000_000
"""Size up to which a file of errors is read: ours is never so large."""
SPEAKERS_SHOWN = 40


class AsrReport(RecipeReport):
    """The word error rate is the goal; error rates are shown in percent."""

    goals = ("wer",)
    percent = ("wer", "cer")

    def sections(self, runs: Sequence[ReportedRun]) -> list[Section]:
        analyses = [read_errors(run) for run in runs]
        texts = [_texts(run, analysis, len(runs)) for run, analysis in zip(runs, analyses, strict=True)]
        figures = [figure for number, run in enumerate(runs) for figure in _kinds(run, number, len(runs))]
        return [Section("errors", "Word errors", "".join(texts), figures)]


def read_errors(run: ReportedRun) -> dict[str, Analysis]:
    """Return the error analysis of the last validation, by set; nothing of a run that has none, or a damaged one."""
    path = run.folder / ERRORS
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}
        return dict(read_analyses(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError):
        return {}


def _kinds(run: ReportedRun, number: int, num_runs: int) -> list[Figure]:
    """Plot substitutions, deletions and insertions in percent of the words, over validations, a plot for each set."""
    figures = []
    for name in dict.fromkeys(name for record in run.validations for name in record.analysis or {}):
        of_set = [(record.step, (record.analysis or {}).get(name, {})) for record in run.validations]
        known = [(step, counts) for step, counts in of_set if _is_complete(counts)]
        traces: list[Trace] = []
        for kind, tint in KINDS.items():
            rates = [short(100 * counts[kind] / counts["words"]) for _, counts in known]
            places = thin(rates)
            xs, ys = [known[place][0] for place in places], [rates[place] for place in places]
            traces.append(line(xs, ys, translate(kind), tint, dots=len(xs) <= 40))
        if known:
            text = (
                translate("Kinds of errors: {name} of {run}") if num_runs > 1 else translate("Kinds of errors: {name}")
            )
            title = text.format(name=name, run=run.name)
            layout = {"xaxis": axis("step", rangemode="nonnegative"), "yaxis": axis("% of words", rangemode="tozero")}
            about = "Wrong, missing and added words, of the words that were said; their sum is the word error rate."
            figures.append(Figure(f"errors-{number}-{name}", title, traces, layout, about))
    return figures


def _is_complete(counts: object) -> bool:
    return (
        isinstance(counts, dict)
        and all(is_number(counts.get(kind)) for kind in (*KINDS, "words"))
        and counts["words"] > 0
    )


def _texts(run: ReportedRun, analyses: dict[str, Analysis], num_runs: int) -> str:
    """Return the errors of the last validation: their kinds, the worst utterances, and the error rate by speaker."""
    blocks = []
    for name, analysis in analyses.items():
        title = escape(name if num_runs == 1 else f"{run.name}: {name}")
        rows = [[translate(kind), f"{analysis[kind]:,}", _rate(analysis[kind], analysis["words"])] for kind in KINDS]  # type: ignore[literal-required]
        titles = [translate("errors"), translate("words"), translate("of the words said")]
        blocks.append(f"<h3>{title}</h3>{table(titles, rows, first_is_head=True)}")
        if analysis["worst"]:
            blocks.append(f"<details><summary>{translate('Worst utterances')}</summary>{_worst(analysis)}</details>")
        if analysis["speakers"]:
            blocks.append(
                f"<details><summary>{translate('Error rate by speaker')}</summary>{_speakers(analysis)}</details>"
            )
    return "".join(blocks)


def _worst(analysis: Analysis) -> str:
    cards = []
    for worst in analysis["worst"]:
        texts_of = marked({"reference": worst["reference"], "hypothesis": worst["hypothesis"]})
        who = "" if worst["speaker"] is None else translate(", speaker {name}").format(name=worst["speaker"])
        head = escape(
            translate("{errors:,} errors in {words:,} words: {name}").format(
                errors=worst["errors"], words=worst["words"], name=worst["name"]
            )
            + who
        )
        texts = "".join(
            f'<div class="text"><span>{escape(translate(of))}</span><span>{text}</span></div>'
            for of, text in texts_of.items()
        )
        cards.append(f'<div class="card sample"><p class="more">{head}</p>{texts}</div>')
    return f'<div class="samples">{"".join(cards)}</div>'


def _speakers(analysis: Analysis) -> str:
    """Return a table of speakers, those with the highest error rate first."""
    sums = [(who, errors, words) for who, (errors, words) in analysis["speakers"].items()]
    worst_first = sorted(sums, key=lambda row: (-row[1] / max(row[2], 1), row[0]))
    rows = [[who, _rate(errors, words), f"{errors:,}", f"{words:,}"] for who, errors, words in worst_first]
    left_out = analysis["num_speakers"] - min(len(rows), SPEAKERS_SHOWN)
    more = translate("{number:,} more, with lower rates or fewer words, are left out.").format(number=left_out)
    note = f'<p class="more">{more}</p>' if left_out > 0 else ""
    titles = [translate("speaker"), translate("word error rate"), translate("errors"), translate("words")]
    return table(titles, rows[:SPEAKERS_SHOWN], first_is_head=True) + note


def _rate(errors: int, words: int) -> str:
    return f"{100 * errors / words:.2f} %" if words else ""
