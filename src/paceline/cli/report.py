"""`paceline report RUN [RUN...]`: how runs went, as one page that opens anywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.cloud.address import Place
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import InvalidSetting
from paceline.core.paths import near
from paceline.core.terminal import tell
from paceline.observe.report.write import PAGE, write_report


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


def run(argv: Sequence[str]) -> int:
    options = load(ReportOptions, argv, prog="paceline report", positional=POSITIONAL)
    if not options.runs:
        raise InvalidSetting("a report of which run?", hint="`paceline report runs/NAME`; `paceline runs` lists runs")
    for folder in options.runs:
        bring_run(folder)
    if options.watch:
        return watch(options.runs, options.port)
    path = options.out or (options.runs[0] / PAGE if len(options.runs) == 1 else Path(PAGE))
    tell(f"{write_report(options.runs, path)}\n")
    return 0


def watch(folders: Sequence[Path], port: int | None) -> int:
    """Serve the page until Ctrl-C; it stays when its runs have ended, for who reads it."""
    from paceline.observe.report.section import recipe_reports
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
