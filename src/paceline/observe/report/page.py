"""The page: one HTML file with its style, its script, plotly and all data in it; it asks the net for nothing."""

from __future__ import annotations

import base64
import functools
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from importlib.util import find_spec
from itertools import groupby
from string import Template

from paceline.core.errors import PacelineError
from paceline.core.language import language, translate
from paceline.observe.report import texts
from paceline.observe.report.curves import learning
from paceline.observe.report.figure import Figure
from paceline.observe.report.gantt import gantts
from paceline.observe.report.ranks import time_lines
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.section import Section
from paceline.observe.report.times import spent


class PlotlyMissing(PacelineError):
    """The package that draws is not installed."""

    sentence = "a report needs the package plotly, which is not installed"
    hint = "`pip install 'paceline[report]'`, or `pip install plotly`"


@dataclass(frozen=True)
class LivePage:
    """What a page that is served must know to follow its runs."""

    version: str
    """Of what it shows: letters and digits."""
    refresh_s: float


def page(runs: Sequence[ReportedRun], *, moment: str | None = None, live: LivePage | None = None) -> str:
    """Return the report of these runs as HTML; one that is `live` asks the server it came from for newer ones."""
    title = runs[0].name if len(runs) == 1 else translate("{number} runs").format(number=len(runs))
    one = translate("task {task}, {standing}").format(task=runs[0].task, standing=runs[0].standing)
    what = one if len(runs) == 1 else ", ".join(run.name for run in runs)
    return document(title, what, sections(runs), moment=moment, live=live)


def document(
    title: str, what: str, content: Sequence[Section], *, moment: str | None = None, live: LivePage | None = None
) -> str:
    """Return a page of these sections as HTML; empty ones are left out."""
    parts = [part for part in content if not part.is_empty]
    figures = [figure.as_json() for part in parts for figure in part.figures]
    links = "".join(f'<a href="#{part.name}">{texts.escape(translate(part.title))}</a>' for part in parts)
    moment = moment or datetime.now().isoformat(sep=" ", timespec="minutes")
    return Template(_file("page.html")).substitute(
        title=texts.escape(title),
        lang=language(),
        report=texts.escape(translate("Paceline report")),
        about=texts.with_code(translate("{what}. Written {moment}.").format(what=what, moment=moment)),
        theme=texts.escape(translate("light / dark")),
        noscript=texts.escape(translate("The plots need JavaScript; all else can be read without.")),
        ended=texts.escape(translate("`paceline report --watch` has ended: this page stays as it is.")),
        old=texts.escape(
            translate("This browser is too old for the plots (it cannot unpack gzip): any of 2023 or later can.")
        ),
        links=links,
        connect="" if live is None else "; connect-src 'self'",
        live="" if live is None else f' data-version="{live.version}" data-refresh="{live.refresh_s:g}"',
        parts="\n".join(_section(part) for part in parts),
        style=_file("page.css"),
        script=_file("page.js"),
        figures=for_script(figures),
        plotly=_packed_once(_plotly()),
    )


def sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return all sections, from the most to the least asked for."""
    return [
        Section("summary", "Summary", texts.summary(runs)),
        Section("verdict", "What held it back" if len(runs) == 1 else "What held them back", texts.verdicts(runs)),
        Section("learning", "Learning", figures=learning(runs)),
        *(section for recipe in runs[0].recipes for section in recipe.sections(runs)),
        Section("samples", "Samples", texts.samples(runs)),
        Section("time", "Time and speed", figures=[*spent(runs), *time_lines(runs), *gantts(runs)]),
        Section("settings", "Settings", texts.settings(runs)),
    ]


def for_script(value: object) -> str:
    """Return JSON that may stand inside a script element: nothing in it can end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def packed(text: str) -> str:
    """Compress a text to a third, as text that browsers unpack themselves."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def _section(part: Section) -> str:
    grids = [list(alike) for _, alike in groupby(part.figures, key=lambda figure: figure.size == "small")]
    plots = "".join(f'<div class="plots">{"".join(_plot(figure) for figure in grid)}</div>' for grid in grids)
    return f'<section id="{part.name}"><h2>{texts.escape(translate(part.title))}</h2>{part.text}{plots}</section>'


def _plot(figure: Figure) -> str:
    on = " on" if figure.layout.get("yaxis", {}).get("type") == "log" else ""
    button = f'<button class="log{on}" data-for="{texts.escape(figure.name)}">log</button>' if figure.may_be_log else ""
    about = f'<p class="more">{texts.escape(translate(figure.about))}</p>' if figure.about else ""
    return (
        f'<figure class="card {figure.size}"><figcaption><h3>{texts.escape(translate(figure.title))}</h3>'
        f'{button}</figcaption>{about}<div class="sideways"><div class="plot" id="{texts.escape(figure.name)}" '
        f'style="min-height:{figure.height}px;min-width:{figure.min_width}px"></div></div></figure>'
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _packed_once(text: str) -> str:
    """Compress a text; a page that is made anew again and again has the same one every time."""
    return packed(text)


def _plotly() -> str:
    """Return the script of plotly, as its Python package ships it."""
    if find_spec("plotly") is None:
        raise PlotlyMissing
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
