"""The edge of `paceline tune TASK --lr`: runs the sweep, draws it, says which learning rate it suggests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from paceline.cli.procs import check_procs
from paceline.cli.tasks import make_task
from paceline.cli.tune import PROG, TuneCommand
from paceline.cli.tune_search import check_folder, write_text
from paceline.config.settings import TrainConfig
from paceline.observe.bars import SideBar
from paceline.train.task import Task
from paceline.train.tune_plot import plot
from paceline.train.tune_rate import BELOW, Point, smooth, suggest
from paceline.train.tune_sweep import sweep
from paceline.world.discover import World
from paceline.world.failure import fail_together
from paceline.world.launch import count_procs, launch
from paceline.world.start import start

NUM_SHOWN = 12


def range_test(
    world: World, found: type[Task], options: TuneCommand, settings: TrainConfig, words: Sequence[str]
) -> int:
    """As one process, as one of many, or as the launcher of `--procs`."""
    if options.csv is not None:
        check_folder(options.csv)
    procs = count_procs(options.procs, settings.device, torch.cuda.device_count()) if world.launcher == "plain" else 1
    if procs > 1:
        return launch(procs, [sys.executable, "-m", "paceline", "tune", *words], device=settings.device)
    return fail_together(world, lambda: _run(world, found, options, settings))


def _run(world: World, found: type[Task], options: TuneCommand, settings: TrainConfig) -> int:
    check_procs(world, options.procs, PROG)
    link = start(
        world,
        device=settings.device,
        threads=settings.threads,
        start_timeout_s=settings.start_timeout_s,
        timeout_s=settings.timeout_s,
    )
    with link:
        with SideBar("learning rates", options.lr_steps) as bar:
            points = sweep(
                make_task(found, options.task),
                settings,
                link,
                first=options.lr_from,
                last=options.lr_to,
                steps=options.lr_steps,
                tell=bar.show,
            )
        if link.is_first:
            sys.stdout.write("".join(f"{line}\n" for line in report(points)))
            if options.csv is not None:
                write_text(options.csv, csv_text(points))
    return 0


def report(points: Sequence[Point]) -> list[str]:
    """A table, a plot, and the suggestion with its rule."""
    smoothed = smooth([point.loss for point in points])
    every = max(1, len(points) // NUM_SHOWN)
    lines = ["   learning rate      loss  smoothed"]
    for number, (point, loss) in enumerate(zip(points, smoothed, strict=True)):
        if number % every == 0 or number == len(points) - 1:
            lines.append(f"  {point.rate:>14.3e}  {point.loss:>8.4g}  {loss:>8.4g}")
    said = suggest(points)
    marks = {} if said.diverges is None else {"x": said.diverges}
    if said.rate is not None:
        marks["^"] = said.rate
    lines += ["", *plot(points, marks), ""]
    lines.append("steepest descent: " + ("nowhere" if said.steepest is None else f"{said.steepest:.3g}"))
    end = (
        "not reached"
        if said.diverges is None
        else f"{said.diverges:.3g} (x), a tenth of it {said.diverges / BELOW:.3g}"
    )
    lines.append(f"divergence: {end}")
    if said.rate is None:
        lines.append("no suggestion: the loss did not fall; try other `--lr-from` and `--lr-to`, or more `--lr-steps`")
    else:
        lines.append(f"suggested: `--lr {said.rate:.2g}` (^), the smaller of the two; nothing was saved")
    return lines


def csv_text(points: Sequence[Point]) -> str:
    smoothed = smooth([point.loss for point in points])
    rows = [f"{point.rate!r},{point.loss!r},{loss!r}\n" for point, loss in zip(points, smoothed, strict=True)]
    return "".join(["lr,loss,smoothed\n", *rows])
