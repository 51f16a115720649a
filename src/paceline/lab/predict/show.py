"""A prediction as a table and lines for the terminal."""

from __future__ import annotations

import sys

from paceline.core.terminal import tell, visible
from paceline.core.units import counted, duration
from paceline.lab.predict.prediction import Prediction, Range, Row


def show(result: Prediction) -> None:
    """Print the table, the staircase, advice, assumptions and what cannot be known."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    has_end = any(row.run_s is not None for row in result.rows)
    has_goodput = any(row.goodput is not None for row in result.rows)
    has_price = any(row.price is not None for row in result.rows)
    titles = ["ranks", "nodes", "step", "compute", "comm.", "wait", "data", "other", "samples/s", "speed-up"]
    titles += ["efficiency", *["whole run"] * has_end, *["goodput"] * has_goodput, *["price"] * has_price]
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    for row in result.rows:
        table.add_row(*map(visible, _cells(row, has_end, has_goodput, has_price)))
    width = None if sys.stdout.isatty() else 200  # nothing is folded in a file
    Console(file=sys.stdout, highlight=False, markup=False, width=width).print(table)
    lines = [
        "in brackets: what holds nine times out of ten; compute, communication that no computing hides, waiting for "
        "the slowest rank, data and other (update, logging) are shares of a step",
        *_stairs(result),
        *result.advice,
    ]
    tell("".join(f"{line}\n" for line in lines))
    tell("".join(f"  assumed: {line}\n" for line in result.assumptions))
    tell("".join(f"  not known: {line}\n" for line in result.unknown))


def _cells(row: Row, has_end: bool, has_goodput: bool, has_price: bool) -> list[str]:
    parts = (row.compute_s, row.communication_s, row.waiting_s, row.data_s, row.other_s)
    cells = [f"{row.ranks:,}", f"{row.nodes:,}", _seconds(row.step_s)]
    cells += [f"{max(0.0, 100 * part / row.step_s.value):.0f} %" for part in parts]
    cells += [_digits(row.samples_per_s.value), f"{row.speedup.value:.2f}", f"{100 * row.efficiency.value:.0f} %"]
    if has_end:
        cells.append("" if row.run_s is None else _long(row.run_s))
    if has_goodput:
        cells.append("" if row.goodput is None else f"{100 * row.goodput.value:.1f} %")
    if has_price:
        cells.append("" if row.price is None else _number(row.price))
    return cells


def _stairs(result: Prediction) -> list[str]:
    stairs = result.staircase
    if len(stairs) < 2 or all(ranks * grains == stairs[0][1] for ranks, grains in stairs):
        return []
    words = ", ".join(f"{counted(grains, 'grain')} from {ranks}" for ranks, grains in stairs)
    return [f"grains of the busiest rank: {words} ranks on; numbers of ranks between two of these are no faster"]


def _seconds(value: Range) -> str:
    scale, unit = (1.0, "s") if value.value >= 1 else (1e3, "ms")
    return f"{_digits(scale * value.value)} {unit} ({_digits(scale * value.low)}-{_digits(scale * value.high)})"


def _number(value: Range) -> str:
    return f"{_digits(value.value)} ({_digits(value.low)}-{_digits(value.high)})"


def _long(value: Range) -> str:
    return f"{duration(value.value)} ({duration(value.low)} - {duration(value.high)})"


def _digits(value: float) -> str:
    """Return three digits of a number, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
