"""`paceline doctor`: look at a machine, or at all ranks of an allocation together, and say what is wrong."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field

from paceline.config.load import load
from paceline.config.settings import BuiltInLogger, BuiltInOptimizer, BuiltInSchedule, PositiveFloat, Section
from paceline.core.plugins import Group
from paceline.core.terminal import emit, tell, visible
from paceline.core.units import counted
from paceline.world.discover.environment import World, discover
from paceline.world.discover.procs import check_procs

if TYPE_CHECKING:
    from paceline.world.doctor.findings import Finding
    from paceline.world.link import Link

PROG = "paceline doctor"

with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class DoctorOptions(Section):
        """Check this machine; under a launcher, or with `--procs N`, all ranks together."""

        procs: Annotated[int, Field(gt=0)] = 1
        """Ranks to start on this machine, to check them together."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """What the ranks compute on."""
        folder: Path = Path("runs")
        """Where runs are to be kept: every rank must see it."""
        start_timeout_s: PositiveFloat = 60.0
        """Seconds to wait for ranks that have not arrived."""
        timeout_s: PositiveFloat = 60.0
        """Seconds a collective may wait for a rank."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of a table."""


OPTIONS, POSITIONAL = DoctorOptions, ()


def run(argv: Sequence[str]) -> int:
    options = load(DoctorOptions, argv, prog=PROG)
    world = discover(os.environ)
    from paceline.world.failure.together import fail_together

    if world.launcher == "plain" and options.procs > 1:
        from paceline.world.launch.launcher import launch

        command = [sys.executable, "-m", "paceline", "doctor", *argv]
        return fail_together(world, lambda: launch(options.procs, command, device=options.device))
    return fail_together(world, lambda: _check(world, options))


def _check(world: World, options: DoctorOptions) -> int:
    check_procs(world, options.procs, PROG)
    from paceline.world.start import start

    link = start(world, device=options.device, start_timeout_s=options.start_timeout_s, timeout_s=options.timeout_s)
    with link:
        findings = examine(link, options.folder)
        if link.is_first:
            if options.json:
                emit(json.dumps([asdict(each) for each in findings], indent=1) + "\n")
            else:
                show(findings)
            sys.stdout.flush()
        return 1 if any(each.verdict == "problem" for each in findings) else 0


def examine(link: Link, folder: Path) -> list[Finding]:
    """Ask, measure and judge, on all ranks; each gets the same answer."""
    from paceline.world.discover.allocation import find_allocation
    from paceline.world.doctor import facts, findings, measure

    world = link.world
    roll = link.gather_objects(facts.collect(world, folder, link.threads, built_in_names()))
    results = [*findings.ranks(world, roll, find_allocation(os.environ)), *findings.versions(roll)]
    results += [*findings.devices(roll), findings.levels(roll, link.gather_objects(_levels(link)))]
    results += [*findings.cores(roll), *findings.load(roll), *findings.network(world, roll)]
    results += [*findings.folder(measure.shared_folder(link, folder), roll), *findings.space(roll)]
    if world.size > 1:
        results.append(findings.clocks(measure.clock_offsets(link), roll))
        results += findings.speed(measure.reductions(link, link.device), world, link.device.type)
    results += [findings.packages(roll), *findings.plugins(roll)]
    answer: list[Finding] = link.broadcast_object(results)
    return answer


def _levels(link: Link) -> str:
    from paceline.core import amx
    from paceline.speed.precision import capabilities, described

    line = described(capabilities(link.device))
    if link.device.type == "cpu" and amx.is_avoided():
        line += f"; AMX is announced and not described by this virtual machine, so it is left out ({amx.VARIABLE})"
    return line


def built_in_names() -> dict[Group, Collection[str]]:
    """Return the names that plugins may not have, by group."""
    return {
        "optimizers": get_args(BuiltInOptimizer),
        "schedules": get_args(BuiltInSchedule),
        "loggers": get_args(BuiltInLogger),
    }


def show(findings: Sequence[Finding]) -> None:
    """Print the table, and a last line that counts what is wrong."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("what", "", "found"):
        table.add_column(title, overflow="fold")
    for each in findings:
        todo = f"\n-> {each.todo}" if each.todo else ""
        table.add_row(*map(visible, (each.what, each.verdict, f"{each.found}{todo}")))
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.print(table)
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in ("problem", "warning")}
    parts = [counted(number, verdict) for verdict, number in counts.items()]
    tell(f"{', '.join(parts)}\n")
