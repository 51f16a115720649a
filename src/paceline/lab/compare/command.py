"""`paceline compare RUN RUN ...`: several seeds of two settings or more, and if their difference means something."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.cloud.address import Place
from paceline.core.cloud.run_copy import bring_run
from paceline.core.run_folder import RunFolder, find_runs
from paceline.core.terminal import emit, one_line, tell
from paceline.core.units import counted

if TYPE_CHECKING:
    from paceline.lab.compare.comparison import Comparison, Pair

with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class CompareOptions(Section):
        """Compare runs of several seeds, grouped by their settings: difference of means, p-values, steps to a value."""

        runs: tuple[Place, ...]
        """Folders of runs, or their addresses, or folders with runs in them; the first run's group is the baseline."""
        group: tuple[str, ...] = ()
        """Settings that make the groups; all that differ and change results, but the seed, if not set."""
        metric: str | None = None
        """What is compared, as `set/metric`; what the first run monitors if not set."""
        mode: Literal["auto", "min", "max"] = "auto"
        """Whether a lower or a higher value is better; `auto` as the run's `monitor_mode` or the metric's name says."""
        take: Literal["last", "best"] = "last"
        """The value of a run: at its last validation, or the best of all (which flatters runs that validate often)."""
        reach: float | None = None
        """Value to which steps are counted; what the worst group comes to if not set."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of tables."""


OPTIONS, POSITIONAL = CompareOptions, ("runs",)


def run(argv: Sequence[str]) -> int:
    options = load(CompareOptions, argv, prog="paceline compare", positional=POSITIONAL)
    result = compare(
        options.runs,
        group=options.group,
        metric=options.metric,
        mode=options.mode,
        take=options.take,
        reach=options.reach,
    )
    if options.json:
        emit(json.dumps(result.to_json(), indent=1) + "\n")
    else:
        _show(result)
    return 0


def compare(
    runs: Sequence[str | PathLike[str]],
    *,
    group: Sequence[str] = (),
    metric: str | None = None,
    mode: Literal["auto", "min", "max"] = "auto",
    take: Literal["last", "best"] = "last",
    reach: float | None = None,
) -> Comparison:
    """Compare runs: those of one setting are a group, and each group is held against that of the first run.

    `runs` are folders of runs, or folders with runs in them. `group` names the settings that make the groups (all that
    differ and change results, but the seed), `metric` is `set/metric` (what the first run monitors), `mode` says if
    lower or higher is better, `take` which value of a run counts, and `reach` is the value to which steps are counted.
    The result has `groups`, `pairs` (difference, Welch's t, permutation test, paired bootstrap) and `notes`.
    """
    from paceline.lab.compare.comparison import TooFewRuns, compare_runs
    from paceline.observe.report.runs import read_runs
    from paceline.observe.report.section import recipe_reports

    folders = [each for given in runs for each in _folders(Path(given))]
    if len(folders) < 2:
        raise TooFewRuns(len(folders))
    read = read_runs(folders, recipe_reports())
    return compare_runs(read, group=tuple(group), metric=metric, direction=mode, take=take, reach=reach)


def _folders(given: Path) -> list[Path]:
    """Return a run, or all runs below a folder that is none."""
    bring_run(given)
    if RunFolder(given).is_run or not given.is_dir():
        return [given]
    return sorted(find_runs(given)) or [given]


def _show(result: Comparison) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, markup=False)
    better = "higher" if result.is_higher_better else "lower"
    which = "last validation" if result.take == "last" else "best validation"
    tell(f"{one_line(result.metric)} of {one_line(result.task)}, {which}; {better} is better\n")
    columns = ("", "runs", "mean", "spread", "from", "to", f"steps to {result.reach:.6g}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in columns:
        table.add_column(title, overflow="fold", justify="left" if not title else "right")
    for group in result.groups:
        values = [each.value for each in group.runs]
        spread = "-" if group.spread is None else f"{group.spread:.3g}"
        steps = "not all" if group.reached is None else f"{group.reached:.0f}"
        table.add_row(
            one_line(group.name), str(len(values)), _number(group.mean), spread, _number(min(values)),
            _number(max(values)), steps,
        )  # fmt: skip
    console.print(table)
    for pair in result.pairs:
        tell("".join(f"{one_line(line)}\n" for line in _words(pair)))
    for note in result.notes:
        tell(f"note: {one_line(note)}\n")


def _words(pair: Pair) -> list[str]:
    verdict = {True: "better", False: "worse", None: "equal"}[pair.is_better]
    lines = [f"{pair.group} against {pair.baseline}: {pair.difference:+.6g} ({verdict})"]
    if pair.welch is not None:
        t = pair.welch
        lines.append(f"  Welch's t: p = {_p(t.p)}, 95% interval {t.low:+.4g} to {t.high:+.4g}, {t.degrees:.1f} degrees")
    if pair.permutation is not None:
        kind = "all" if pair.permutation.is_exact else "drawn"
        lines.append(
            f"  permutation of runs: p = {_p(pair.permutation.p)} ({pair.permutation.num_splits} splits, {kind})"
        )
    if pair.bootstrap is not None:
        b = pair.bootstrap
        samples = counted(b.num_samples, "sample")
        lines.append(f"  paired bootstrap of {samples}: p = {_p(b.p)}, 95% interval {b.low:+.4g} to {b.high:+.4g}")
    if pair.steps_ratio is not None:
        ratio, word = (pair.steps_ratio, "fewer") if pair.steps_ratio >= 1 else (1 / pair.steps_ratio, "more")
        how = "as many" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f} times {word}"
        lines.append(f"  steps to the same value: {how}")
    if pair.welch is None and pair.bootstrap is None:
        lines.append("  no p-value: one run on a side, and no scores of samples")
    return lines


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.0001 else "< 0.0001"


def _number(value: float) -> str:
    return f"{value:.6g}"
