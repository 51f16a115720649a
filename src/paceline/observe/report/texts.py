"""Words and tables of the page: HTML that can be read without a script."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from paceline.core.language import translate
from paceline.core.run_folder import METRICS
from paceline.core.units import worded
from paceline.observe.report.findings import held_back, nothing_found
from paceline.observe.report.ranks import losses
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.samples import Sample, marked, samples_of
from paceline.observe.report.settings import differences, settings_of, start_of
from paceline.observe.report.summary import comparison, facts

MOST_SAMPLES = 10
"""Of each set of each run."""


def escape(text: object) -> str:
    return html.escape(str(text))


def with_code(text: str) -> str:
    """Escape a text; what stands between backticks is shown as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def summary(runs: Sequence[ReportedRun]) -> str:
    """Return cards for one run, a table for several; a run that is not finished has a note."""
    notes = [
        f'<p class="note">{_named(run, runs)}{with_code(run.standing[:1].upper() + run.standing[1:])}.</p>'
        for run in runs
        if run.status != "finished"
    ]
    notes += [f'<p class="note">{_named(run, runs)}{escape(_unread(run))}</p>' for run in runs if run.num_unread]
    if len(runs) > 1:
        return "".join(notes) + table(*comparison(runs), first_is_head=True)
    cards = [
        f'<div class="card fact"><div class="name">{escape(fact.name)}</div>'
        f'<div class="value">{escape(fact.value)}</div><div class="more">{escape(fact.note)}</div></div>'
        for fact in facts(runs[0])
    ]
    return "".join(notes) + f'<div class="facts">{"".join(cards)}</div>'


def _unread(run: ReportedRun) -> str:
    text = translate("{lines:#line} of {file} cannot be read: what stood there is not on this page.")
    return worded(text, {"lines": run.num_unread, "file": METRICS})


def verdicts(runs: Sequence[ReportedRun]) -> str:
    """Return what held each run back, and what to type next."""
    blocks = []
    for run in runs:
        lines = [
            f'<li class="card held"><strong>{escape(held.text[:1].upper() + held.text[1:])}</strong> '
            f'<span class="more">{escape(held.when)}</span><p>{with_code(held.advice)}</p></li>'
            for held in [*losses(run), *held_back(run)]
        ]
        if lines:
            blocks.append(f'{_heading(run, runs)}<ul class="plain">{"".join(lines)}</ul>')
        else:
            is_good, reason = nothing_found(run)
            look = ' class="good"' if is_good else ""
            blocks.append(f"<p{look}>{_named(run, runs)}{reason}</p>")
    return "".join(blocks)


def samples(runs: Sequence[ReportedRun]) -> str:
    """Return some samples at the last validation; earlier hypotheses are folded up."""
    blocks = []
    for run in runs:
        for name, each in samples_of(run).items():
            rows = []
            for sample in each[:MOST_SAMPLES]:
                texts = "".join(_text_row(of, text) for of, text in marked(sample.last).items())
                before = "".join(
                    f"<p><span>{translate('step')} {step + 1:,}</span> {text}</p>" for step, text in _earlier(sample)
                )
                folded = f"<details><summary>{translate('before')}</summary>{before}</details>" if before else ""
                rows.append(f'<div class="card sample">{texts}{folded}</div>')
            title = name if len(runs) == 1 else f"{run.name}: {name}"
            blocks.append(f'<h3>{escape(title)}</h3><div class="samples">{"".join(rows)}</div>')
    return "".join(blocks)


def _earlier(sample: Sample) -> list[tuple[int, str]]:
    return [(step, marked(texts).get("hypothesis") or _joined(texts)) for step, texts in sample.before]


def settings(runs: Sequence[ReportedRun]) -> str:
    """Return differences, where there are several runs, and all settings, folded up."""
    names, every = [run.name for run in runs], [settings_of(run) for run in runs]
    starts = [start_of(run) for run in runs]
    blocks = []
    if len(runs) > 1:
        for title, different in (("Settings that differ", differences(every)), ("Starts", differences(starts))):
            rows = [[name, *values] for name, values in different.items()]
            body = table(["", *names], rows, first_is_head=True) if rows else f"<p>{translate('None.')}</p>"
            blocks.append(f"<h3>{translate(title)}</h3>{body}")
    else:
        rows = [[translate(name), value] for name, value in starts[0].items()]
        blocks.append(table([translate("start"), ""], rows, first_is_head=True))
    rows = [
        [name, *(one.get(name, "") for one in every)] for name in dict.fromkeys(key for one in every for key in one)
    ]
    whole = table([translate("setting"), *names], rows, first_is_head=True)
    all_of_them = worded(translate("All {number:#setting}"), {"number": len(rows)})
    return "".join([*blocks, f"<details><summary>{all_of_them}</summary>{whole}</details>"])


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, first_is_head: bool = False) -> str:
    """Return a table that scrolls by itself where the screen is narrow."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = []
    for row in rows:
        cells = [f"<td>{escape(cell)}</td>" for cell in row]
        if first_is_head:
            cells[0] = f'<th scope="row">{escape(row[0])}</th>'
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _text_row(name: str, text: str) -> str:
    return f'<div class="text"><span>{escape(translate(name))}</span><span>{text}</span></div>'


def _joined(texts: Mapping[str, str]) -> str:
    return escape("; ".join(f"{name}: {text}" for name, text in texts.items()))


def _heading(run: ReportedRun, runs: Sequence[ReportedRun]) -> str:
    return f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""


def _named(run: ReportedRun, runs: Sequence[ReportedRun]) -> str:
    return f"<strong>{escape(run.name)}</strong>: " if len(runs) > 1 else ""
