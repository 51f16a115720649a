"""What every benchmark script prints: a readable table under one line about the machine, or JSON rows with `--json`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

WIDTH = 180


@dataclass(frozen=True)
class Row:
    """One measured number, beside the same number of a peer run in the same script where there is one."""

    case: str
    metric: str
    value: float
    unit: str
    versus: str | None = None
    """Case that the number is compared with."""
    ratio: float | None = None
    """This value divided by that of `versus`."""


def parser(description: str) -> argparse.ArgumentParser:
    """The command line that all benchmark scripts share."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    return arguments


def show(rows: Iterable[Row], title: str, as_json: bool) -> None:
    """Print the rows for a reader, or for a program."""
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
        return
    table = Table(title=title, title_justify="left")
    for name in ("case", "metric", "value", "unit", "versus", "ratio"):
        table.add_column(name, justify="right" if name in ("value", "ratio") else "left", no_wrap=True)
    previous = ""
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        if previous and row.case != previous:
            table.add_section()
        previous = row.case
        table.add_row(row.case, row.metric, _readable(row.value), row.unit, row.versus or "", ratio)
    print(machine())
    # A file has no width: what is cut off there is lost.
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    sys.stdout.flush()


def machine() -> str:
    """What the numbers were measured on, with which command: a benchmark note that lacks it cannot be repeated."""
    parts = [f"{_processor()} x {os.cpu_count()}", f"python {platform.python_version()}"]
    if "torch" in sys.modules:
        import torch

        parts.append(f"torch {torch.__version__}")
        if torch.cuda.is_available():
            parts.append(f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}")
    command = shlex.join(["python", *sys.argv])
    return " | ".join([*parts, datetime.date.today().isoformat(), command])


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _readable(value: float) -> str:
    """Three digits that matter, whole numbers in full."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
