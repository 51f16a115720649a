"""The edge of `paceline tune TASK --lr`: runs the sweep, draws it, says which learning rate it suggests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from paceline.config.settings import TrainConfig
from paceline.core.terminal import tell
from paceline.core.units import counted
from paceline.lab.tune.command import PROG, TuneCommand
from paceline.lab.tune.contest import check_folder, write_text
from paceline.lab.tune.plot import plot
from paceline.lab.tune.range_test import Doubt, Point, Suggestion, smooth, suggest, wider
from paceline.lab.tune.rate_sweep import is_cut_short, sweep
from paceline.observe.bars import SideBar
from paceline.train.find_task import make_task
from paceline.train.task import Task
from paceline.world.discover.environment import World
from paceline.world.discover.procs import check_procs
from paceline.world.failure.board import EXIT_INTERRUPT
from paceline.world.failure.together import fail_together
from paceline.world.launch.launcher import count_procs, launch
from paceline.world.start import from_settings

NUM_SHOWN = 12
_DOUBTS: dict[Doubt, str] = {
    "short": "these are too few steps to see where the loss falls",
    "interrupted": "the loss had not yet risen again, so where it falls most steeply is not known",
    "flat": "the loss neither fell nor rose by more than it differs from batch to batch",
    "high": "the loss rose without having fallen: these rates are too high",
    "hasty": "the loss diverged without having fallen by more than it differs from batch to batch",
    "early": "the loss falls most steeply at the very first rates, and lower ones may be better",
    "open": "the loss has not diverged, so a tenth of where it does may be less than where it falls most steeply",
}


def range_test(
    world: World, task_type: type[Task], options: TuneCommand, settings: TrainConfig, words: Sequence[str]
) -> int:
    """As one process, as one of many, or as the launcher of `--procs`."""
    if options.csv is not None:
        check_folder(options.csv)
    procs = count_procs(options.procs, settings.device, torch.cuda.device_count()) if world.launcher == "plain" else 1
    if procs > 1:
        return launch(procs, [sys.executable, "-m", "paceline", "tune", *words], device=settings.device)
    return fail_together(world, lambda: _run(world, task_type, options, settings))


def _run(world: World, task_type: type[Task], options: TuneCommand, settings: TrainConfig) -> int:
    check_procs(world, options.procs, PROG)
    with from_settings(settings, world) as link:
        with SideBar("learning rates", options.lr_steps) as bar:
            points = sweep(
                make_task(task_type, options.task),
                settings,
                link,
                first=options.lr_from,
                last=options.lr_to,
                steps=options.lr_steps,
                tell=bar.show,
            )
        is_interrupted = bool(link.broadcast_object(is_cut_short(points, options.lr_steps) if link.is_first else None))
        if link.is_first:
            tell("".join(f"{line}\n" for line in report(points, options, is_interrupted=is_interrupted)))
            if options.csv is not None:
                write_text(options.csv, csv_text(points))
                tell(f"{options.csv} is written, with {counted(len(points), 'step')}\n")
    return EXIT_INTERRUPT if is_interrupted else 0


def report(points: Sequence[Point], options: TuneCommand, *, is_interrupted: bool) -> list[str]:
    """A table, a plot, and the suggestion with its rule, or why there is none."""
    if not points:
        return ["interrupted before the first step: nothing was measured"]
    smoothed = smooth([point.loss for point in points])
    every = max(1, len(points) // NUM_SHOWN)
    lines = ["   learning rate      loss  smoothed"]
    for number, (point, loss) in enumerate(zip(points, smoothed, strict=True)):
        if number % every == 0 or number == len(points) - 1:
            lines.append(f"  {point.rate:>14.3e}  {point.loss:>8.4g}  {loss:>8.4g}")
    suggestion = suggest(points, is_interrupted=is_interrupted)
    marks = {} if suggestion.diverges is None else {"x": suggestion.diverges}
    if suggestion.rate is not None:
        marks["^"] = suggestion.rate
    lines += ["", *plot(points, marks), ""]
    if is_interrupted:
        lines.append(f"interrupted after {len(points)} of {options.lr_steps} steps, at {points[-1].rate:.2g}")
    if suggestion.steepest is not None and suggestion.doubt not in ("interrupted", "early"):
        lines.append(f"steepest descent: {suggestion.steepest:.3g}")
    if suggestion.diverges is not None and suggestion.tenth is not None:
        lines.append(f"divergence: {suggestion.diverges:.3g} (x), a tenth of it {suggestion.tenth:.3g}")
    elif suggestion.doubt not in ("interrupted", "high"):
        lines.append(f"divergence: not reached up to {points[-1].rate:.2g}")
    return [*lines, *_verdict(suggestion, options)]


def _verdict(suggestion: Suggestion, options: TuneCommand) -> list[str]:
    """The rate to take, or what is not known and what to type next."""
    if suggestion.rate is not None:
        rule = "the steepest" if suggestion.rate == suggestion.steepest else "a tenth of where it diverges"
        both = ", the smaller of the two" if suggestion.tenth is not None else ""
        return [f"suggested: `--lr {suggestion.rate:.2g}` (^), {rule}{both}; nothing was saved"]
    doubt: Doubt = suggestion.doubt or "flat"
    fields = TuneCommand.model_fields
    first, last = wider(doubt, options.lr_from, options.lr_to, fields["lr_from"].default, fields["lr_to"].default)
    advice = f"try `--lr-from {first:.2g} --lr-to {last:.2g}`"
    hints = {
        "short": "try more `--lr-steps`",
        "hasty": f"try `--lr-steps {4 * options.lr_steps}`, or a larger batch",
        "interrupted": "let it run to its end, with fewer `--lr-steps`",
    }
    return [f"no suggestion: {_DOUBTS[doubt]}", f"  {hints.get(doubt, advice)}"]


def csv_text(points: Sequence[Point]) -> str:
    smoothed = smooth([point.loss for point in points])
    rows = [f"{point.rate!r},{point.loss!r},{loss!r}\n" for point, loss in zip(points, smoothed, strict=True)]
    return "".join(["lr,loss,smoothed\n", *rows])
