"""`paceline predict RUN ...`: speed on other numbers of ranks, with intervals."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.load import load
from paceline.config.settings import Positive, PositiveFloat, Section
from paceline.core.cloud.address import local_path
from paceline.core.disk import cannot_write, replacing
from paceline.core.paths import near
from paceline.core.terminal import emit, tell, visible
from paceline.core.units import counted, duration
from paceline.lab.predict import api
from paceline.lab.predict.prediction import Prediction, Range, Row
from paceline.lab.predict.report import FILE

with warnings.catch_warnings():
    # `json` hides a deprecated method of pydantic; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class PredictOptions(Section):
        """Predict the speed of a run on other numbers of ranks and machines, with intervals, and what to change."""

        source: tuple[str, ...]
        """Folders of runs of one task, such as one on 1 rank and one on 2."""
        ranks: tuple[Annotated[int, Field(gt=0)], ...] = ()
        """Numbers of ranks, separated by commas (default: 1 to 64)."""
        nodes: tuple[Annotated[int, Field(gt=0)], ...] = ()
        """Numbers of machines, one for each of `ranks` or one for all; alone, each machine has as many ranks as in the
        run. By default, each rank is on a machine of its own."""
        link: str | None = None
        """Bandwidth and latency between machines, in one direction, such as `100Gbit,10us` (default: 10Gbit,50us)."""
        link_file: Path | None = None
        """File with the measured link between machines: output of `paceline doctor --json` on two machines or more."""
        run_link: str | None = None
        """Link between the ranks of the given runs, if they were on several machines."""
        reduce: Literal["grad", "param"] | None = None
        """Reduction to predict for: summed gradients or averaged parameters (default: that of the run)."""
        sums: Literal["exact", "fast"] | None = None
        """Order of addition: fixed, or that of the library (default: that of the run)."""
        wire: Literal["full", "fp16", "bf16", "int8"] | None = None
        """Number format on the wire (default: that of the run)."""
        shard: Literal["none", "full", "node"] | None = None
        """Sharding to predict for (default: that of the run)."""
        sync_step: Positive | None = None
        """Steps between two averages of `reduce: param` (default: that of the run, or 1)."""
        sync_seconds: PositiveFloat | None = None
        """Seconds between two averages, instead of `sync_step`."""
        sync_overlap: Annotated[int, Field(ge=0)] | None = None
        """Steps that continue during an average (default: that of the run)."""
        grains: Positive | None = None
        """Grains per step (default: those of the run if they were set, else one per rank)."""
        failures: str | None = None
        """Failures per 1,000 node-days, such as `4/1000nd` or `2.3-6.5/1000nd`: adds the share of useful time."""
        price: PositiveFloat | None = None
        """Price of a rank for an hour, in any currency."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of a table."""


OPTIONS, POSITIONAL = PredictOptions, ("source",)


def run(argv: Sequence[str]) -> int:
    options = load(PredictOptions, argv, prog="paceline predict", positional=POSITIONAL)
    values = {name: getattr(options, name) for name in PredictOptions.model_fields if name not in ("source", "json")}
    result = api.predict(options.source, **values)
    if options.json:
        emit(json.dumps(result.to_json(), indent=1) + "\n")
        return 0
    show(result)
    folder = local_path(options.source[0])
    path, text = folder / FILE, json.dumps(result.to_json(), indent=1)
    try:
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error, len(text), "it keeps the prediction for the report") from error
    tell(f"\nin {near(path)}; `paceline report {near(folder)}` draws it\n")
    return 0


def show(result: Prediction) -> None:
    """Print the table, the staircase, advice, assumptions and what is not known."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (cells := [_cells(row) for row in result.rows])[0]:
        table.add_column(title, justify="right", overflow="fold")
    for row in cells:
        table.add_row(*map(visible, row.values()))
    width = None if sys.stdout.isatty() else 200  # nothing is folded in a file
    Console(file=sys.stdout, highlight=False, markup=False, width=width).print(table)
    tell(
        "in brackets: the interval that holds nine times out of ten; compute, communication that no computing hides, "
        "waiting for the slowest rank, data and other (update, logging) are shares of a step\n"
    )
    if len(result.staircase) > 1:
        stairs = ", ".join(f"{counted(grains, 'grain')} from {ranks}" for ranks, grains in result.staircase)
        tell(f"grains of the busiest rank: {stairs} ranks on; numbers of ranks between two of these are no faster\n")
    tell("".join(f"{line}\n" for line in result.advice))
    tell("".join(f"  assumed: {line}\n" for line in result.assumptions))
    tell("".join(f"  not known: {line}\n" for line in result.unknown))


def _cells(row: Row) -> dict[str, str]:
    parts = {
        "compute": row.compute_s,
        "comm.": row.communication_s,
        "wait": row.waiting_s,
        "data": row.data_s,
        "other": row.other_s,
    }
    scale, unit = (1.0, "s") if row.step_s.value >= 1 else (1e3, "ms")
    cells = {"ranks": f"{row.ranks:,}", "nodes": f"{row.nodes:,}"}
    cells["step"] = _with_interval(row.step_s.scaled(scale), f" {unit}")
    cells |= {title: f"{max(0.0, 100 * part / row.step_s.value):.0f} %" for title, part in parts.items()}
    cells |= {"samples/s": _digits(row.samples_per_s.value), "speed-up": f"{row.speedup.value:.2f}"}
    cells["efficiency"] = f"{100 * row.efficiency.value:.0f} %"
    if row.run_s is not None:
        low, value, high = (duration(each) for each in (row.run_s.low, row.run_s.value, row.run_s.high))
        cells["whole run"] = f"{value} ({low} - {high})"
    if row.goodput is not None:
        cells["goodput"] = f"{100 * row.goodput.value:.1f} %"
    if row.price is not None:
        cells["price"] = _with_interval(row.price)
    return cells


def _with_interval(value: Range, unit: str = "") -> str:
    return f"{_digits(value.value)}{unit} ({_digits(value.low)}-{_digits(value.high)})"


def _digits(value: float) -> str:
    """Return three digits of a number, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
