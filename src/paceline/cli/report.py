"""`paceline report RUN [RUN...]`: how runs went, as one page that opens anywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core import plugins
from paceline.core.cloud.address import Place
from paceline.core.cloud.file_copy import send
from paceline.core.cloud.run_copy import bring_run
from paceline.core.disk import cannot_write, replacing
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.run_folder import METRICS
from paceline.core.terminal import tell
from paceline.core.units import counted

if TYPE_CHECKING:
    from paceline.observe.report.section import RecipeReport

PAGE = "report.html"


class ReportOptions(Section):
    """Write one HTML page about runs: losses, metrics, time, verdicts, settings and their differences, samples."""

    runs: tuple[Place, ...]
    """Folders of runs, or their addresses."""
    out: Place | None = None
    """The page; `report.html` in the run's folder if not set, in the working folder for several runs."""
    watch: bool = False
    """Serve the page on this machine (127.0.0.1) instead, made anew while the runs go on; Ctrl-C ends it."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port to serve on with `watch`; a free one if not set."""

    def contradictions(self) -> Iterator[str]:
        """Yield settings that mean something only with, or only without, `watch`."""
        yield from super().contradictions()
        if self.watch and self.out is not None:
            yield "`watch` serves the page and `out` writes it: leave one of them out"
        if self.port is not None and not self.watch:
            yield "`port` has no effect without `watch`"


OPTIONS, POSITIONAL = ReportOptions, ("runs",)


class NoRunGiven(PacelineError):
    """No run is named."""

    sentence = "a report of which run?"
    hint = "`paceline report runs/NAME`; `paceline runs` lists runs"


def run(argv: Sequence[str]) -> int:
    options = load(ReportOptions, argv, prog="paceline report", positional=POSITIONAL)
    if not options.runs:
        raise NoRunGiven
    for folder in options.runs:
        bring_run(folder)
    if options.watch:
        return watch(options.runs, options.port)
    path = options.out or (options.runs[0] / PAGE if len(options.runs) == 1 else Path(PAGE))
    tell(f"{write_report(options.runs, path)}\n")
    return 0


def watch(folders: Sequence[Path], port: int | None) -> int:
    """Serve the page until Ctrl-C; it stays when its runs have ended, for who reads it."""
    from paceline.observe.report.server import Live, address, serve
    from paceline.observe.report.watch import make_page, seen

    recipes = recipe_reports()
    live = Live(lambda: seen(folders), lambda version: make_page(folders, recipes, version))
    live.newest()  # mistakes are told now, not to a browser
    with serve(live, port or 0) as server:
        tell(f"report of {', '.join(map(near, folders))}: {address(server)} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    tell("ended; the runs go on\n" if seen(folders)[1] else "ended\n")
    return 0


def recipe_reports() -> list[RecipeReport]:
    """Return the report sections that plugins register."""
    return [
        plugins.guarded(plugin, "cannot be made", plugins.load(plugin)) for plugin in plugins.installed().of("reports")
    ]


def write_report(folders: Sequence[Path], path: Path) -> str:
    """Make the page; returns the line that says so. It has its name only when it is complete."""
    from paceline.observe.report.page import page
    from paceline.observe.report.runs import read_runs

    runs = read_runs(folders, recipe_reports())
    text = page(runs)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error, len(text.encode()), "it writes the page") from error
    send(path)
    unfinished = [run.name for run in runs if run.status not in ("finished", "early", "stopped", "diverged")]
    notes = f" ({', '.join(unfinished)}: not finished, shown as far as it came)" if unfinished else ""
    for run in runs:
        if run.num_unread:
            lines = f"{counted(run.num_unread, 'line')} of {near(run.folder / METRICS)}"
            notes += f"; left out, because they cannot be read: {lines}"
    return f"report in {near(path)}, {path.stat().st_size / 1e6:.1f} MB; it opens in any browser, also offline{notes}"
