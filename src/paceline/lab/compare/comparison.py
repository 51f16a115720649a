"""Comparison of runs: grouped by what differs in their settings, each group against the first one."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.config.settings import TrainConfig
from paceline.core.errors import Conflict, NotFound, PacelineError
from paceline.core.units import counted
from paceline.lab.compare.significance import Bootstrap, Permutation, Welch, paired_bootstrap, permutation, welch
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.settings import ABSENT, OWN_NAMES, settings_of
from paceline.observe.sample_scores import SampleScores, read_scores

HIGHER = frozenset(("accuracy", "bleu", "chrf", "f1", "auc", "precision", "recall", "score", "top1", "top5"))
"""Metrics of which more is better, where the settings of a run do not say."""
Direction = Literal["auto", "min", "max"]


class TooFewRuns(PacelineError):
    """Fewer than two runs."""

    number: int
    sentence = "a comparison of {number:#run}?"
    hint = "give two or more (`paceline compare runs/a1 runs/a2 runs/b1 runs/b2`), or a folder with runs in it"


@dataclass(frozen=True)
class RunValue:
    """A run, and what it came to."""

    name: str
    folder: str
    seed: str
    status: str
    value: float
    step: int
    """Last step before the validation that gave it."""
    reached: int | None
    """Steps until a validation reached the value to reach; None if none did."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one setting."""

    settings: dict[str, str]
    """By which it differs from the other groups."""
    runs: list[RunValue]
    mean: float
    spread: float | None
    """Standard deviation; None of a single run."""
    reached: float | None
    """Mean number of steps until the value to reach, if all runs reached it."""

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Pair:
    """A group against the first one."""

    group: str
    baseline: str
    difference: float
    """Of the means, this group's minus the first one's."""
    is_better: bool | None
    """None where the means are equal."""
    welch: Welch | None
    """None where a group has one run."""
    permutation: Permutation | None
    bootstrap: Bootstrap | None
    """None where runs have no scores of their samples, or of other samples."""
    steps_ratio: float | None
    """Steps of the first group to the value to reach, over this group's: above 1 where this one needs fewer."""


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, and the differences between them."""

    task: str
    metric: str
    is_higher_better: bool
    take: str
    reach: float
    groups: list[RunGroup]
    pairs: list[Pair]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values: dict[str, Any] = _finite(asdict(self))
        for group, of in zip(values["groups"], self.groups, strict=True):
            group["name"] = of.name
        return values


def compare_runs(
    runs: Sequence[ReportedRun],
    *,
    group: Sequence[str] = (),
    metric: str | None = None,
    direction: Direction = "auto",
    take: Literal["last", "best"] = "last",
    reach: float | None = None,
) -> Comparison:
    """Return the comparison of runs of one task; the group of the first run is the one that others are held against."""
    _check(runs)
    named = _metric(runs, metric)
    is_higher = _is_higher(runs[0], named) if direction == "auto" else direction == "max"
    grouped, labels = _grouped(runs, group)
    curves = {run.name: _curve(run, named) for run in runs}
    finals = {name: _final(curve, take, is_higher) for name, curve in curves.items()}
    means = [statistics.fmean(finals[run.name][1] for run in members) for members in grouped]
    goal = reach if reach is not None else (min(means) if is_higher else max(means))
    groups = [
        _group(members, names, curves, finals, goal, is_higher) for members, names in zip(grouped, labels, strict=True)
    ]
    scores = [_scores(members, named, finals) if take == "last" else None for members in grouped]
    pairs = [_pair(groups[0], other, scores[0], scores[number]) for number, other in enumerate(groups[1:], 1)]
    pairs = [_judged(pair, is_higher) for pair in pairs]
    notes = [*_notes(runs, grouped, groups), *_bootstrap_notes(scores, named, take)]
    return Comparison(runs[0].task, named, is_higher, take, goal, groups, pairs, notes)


def _check(runs: Sequence[ReportedRun]) -> None:
    if len(runs) < 2:
        raise TooFewRuns(len(runs))
    seen: set[Path] = set()
    for run in runs:
        if run.folder.resolve() in seen:
            raise Conflict(f"{run.folder} is given twice: a run counts once", hint="leave one of them out")
        seen.add(run.folder.resolve())
    tasks = list(dict.fromkeys(run.task for run in runs))
    if len(tasks) > 1:
        raise Conflict(f"the runs are of different tasks: {', '.join(tasks)}", hint="compare runs of one task")


def _metric(runs: Sequence[ReportedRun], metric: str | None) -> str:
    named = metric or runs[0].monitor
    if named is None:
        raise _without_value(runs[0].name, None, runs[0].metrics)
    for run in runs:
        if not _curve(run, named):
            common = [name for name in run.metrics if all(_curve(other, name) for other in runs)]
            raise _without_value(run.name, named if run.metrics else None, common)
    return named


def _without_value(run: str, metric: str | None, known: Sequence[str]) -> NotFound:
    """Return the error for a run that has no value of the metric; `known` are the metrics of all runs."""
    if metric is None and not known:
        hint = "let it validate (a task with `val_data`), or leave it out"
    elif known:
        hint = f"`--metric` one of {', '.join(known)}; or leave the run out"
    else:
        hint = "leave it out: no metric is common to all of these runs; or train on the same sets"
    return NotFound(
        f"{run} has no {'validation in its journal' if metric is None else f'value of `{metric}`'}", hint=hint
    )


def _is_higher(run: ReportedRun, metric: str) -> bool:
    if run.settings.get("monitor") == metric:
        return run.is_higher_better
    return metric.rpartition("/")[2].lower() in HIGHER


def _curve(run: ReportedRun, metric: str) -> list[tuple[int, float]]:
    """Return (last step, value) of all validations that have a finite one."""
    values = [(record.step, record.metrics.get(metric)) for record in run.validations]
    return [(step, float(value)) for step, value in values if value is not None and math.isfinite(float(value))]


def _final(curve: list[tuple[int, float]], take: str, is_higher: bool) -> tuple[int, float]:
    if take == "last":
        return curve[-1]
    return max(curve, key=lambda point: point[1] if is_higher else -point[1])


def _grouped(runs: Sequence[ReportedRun], group: Sequence[str]) -> tuple[list[list[ReportedRun]], list[dict[str, str]]]:
    """Return the groups, in the order of their first runs, and the settings that name each."""
    each = [settings_of(run) for run in runs]
    known = list(dict.fromkeys(name for one in each for name in one))
    for name in group:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"nearest: {', '.join(nearest)}" if nearest else "`paceline diff RUN RUN` shows settings"
            raise NotFound(f"no run has a setting `{name}`", hint=hint)
    names = list(group) or [name for name in known if _makes_a_group(name, each)]
    groups: dict[tuple[str, ...], list[ReportedRun]] = {}
    for run, one in zip(runs, each, strict=True):
        groups.setdefault(tuple(one.get(name, ABSENT) for name in names), []).append(run)
    if len(groups) < 2:
        same = f"the same `{' and '.join(group)}`" if group else "the same settings but for the seed"
        hint = "add runs with another setting; `paceline diff RUN RUN` shows how two differ"
        if not group and len(runs) > 1:
            hint = "add runs with another setting, or compare seeds: `--group seed`"
        raise Conflict(
            f"{counted(len(runs), 'run')} with {same} are one group: there is nothing to compare it with", hint=hint
        )
    return list(groups.values()), [dict(zip(names, values, strict=True)) for values in groups]


def _makes_a_group(name: str, each: Sequence[Mapping[str, str]]) -> bool:
    """Return True if runs differ in a setting that changes results, other than the seed."""
    if name == "seed" or name in OWN_NAMES or len({one.get(name, ABSENT) for one in each}) < 2:
        return False
    info = TrainConfig.model_fields.get(name)
    extra = None if info is None else info.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("free"))


def _group(
    members: Sequence[ReportedRun],
    names: dict[str, str],
    curves: Mapping[str, list[tuple[int, float]]],
    finals: Mapping[str, tuple[int, float]],
    goal: float,
    is_higher: bool,
) -> RunGroup:
    runs = []
    for run in members:
        step, value = finals[run.name]
        seed = settings_of(run).get("seed", ABSENT)
        reached = steps_to(curves[run.name], goal, is_higher)
        runs.append(RunValue(run.name, str(run.folder), seed, run.status, value, step, reached))
    values = [run.value for run in runs]
    steps = [run.reached for run in runs if run.reached is not None]
    return RunGroup(
        names,
        runs,
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else None,
        statistics.fmean(steps) if len(steps) == len(runs) else None,
    )


def steps_to(curve: Sequence[tuple[int, float]], goal: float, is_higher: bool) -> int | None:
    """Return the number of steps until the first validation that is at least as good as the goal; None if none is."""
    return next((step + 1 for step, value in curve if (value >= goal if is_higher else value <= goal)), None)


def _scores(
    members: Sequence[ReportedRun], metric: str, finals: Mapping[str, tuple[int, float]]
) -> list[SampleScores] | None:
    """Return the scores of all samples of each run; None unless all have them, of the validation that counts."""
    each = [(read_scores(run.folder).get(metric), finals[run.name][1]) for run in members]
    scores = [score for score, value in each if score is not None and math.isclose(score.value(), value, rel_tol=1e-4)]
    return scores if len(scores) == len(each) else None


def _pair(
    baseline: RunGroup, group: RunGroup, first: list[SampleScores] | None, second: list[SampleScores] | None
) -> Pair:
    values = [[run.value for run in each.runs] for each in (baseline, group)]
    bootstrap = None
    if first and second and all(first[0].is_of_the_same(other) for other in (*first, *second)):
        bootstrap = paired_bootstrap(first, second)
    return Pair(
        group.name,
        baseline.name,
        group.mean - baseline.mean,
        None,
        welch(*values),
        permutation(*values) if min(map(len, values)) > 1 else None,
        bootstrap,
        baseline.reached / group.reached if baseline.reached and group.reached else None,
    )


def _judged(pair: Pair, is_higher: bool) -> Pair:
    better = None if pair.difference == 0 else (pair.difference > 0) == is_higher
    return Pair(**{**vars(pair), "is_better": better})


def _notes(
    runs: Sequence[ReportedRun], grouped: Sequence[Sequence[ReportedRun]], groups: Sequence[RunGroup]
) -> Iterator[str]:
    unfinished = [run.name for run in runs if run.status not in ("finished", "early")]
    if unfinished:
        yield f"not finished, taken as far as they came: {', '.join(unfinished)}"
    for group in groups:
        yield from _seed_notes(group)
    yield from _permutation_notes(min(len(group.runs) for group in groups))
    yield from _setting_notes(runs, grouped, groups[0].settings)


def _seed_notes(group: RunGroup) -> Iterator[str]:
    """Say what the seeds of a group leave open: equal ones, or a single one."""
    if len({run.seed for run in group.runs}) < len(group.runs):
        yield f"{group.name}: runs with the same seed are not independent, and p-values are too small"
    if len(group.runs) == 1:
        yield f"{group.name}: one run, so nothing is known of its spread; train more seeds (`--seed 1`, ...)"


def _permutation_notes(num_runs: int) -> Iterator[str]:
    """Say how small a p-value can get with this number of runs in the smallest group, if that is not small enough."""
    if num_runs < 2:
        return
    least = 2 / math.comb(2 * num_runs, num_runs)
    if least > 0.05:
        runs_word = counted(num_runs, "run")
        yield f"with {runs_word} a group the permutation test cannot come below {least:.3g}: more seeds are needed"


def _setting_notes(
    runs: Sequence[ReportedRun], grouped: Sequence[Sequence[ReportedRun]], named: Container[str]
) -> Iterator[str]:
    """Say in which settings runs differ beside those that name the groups."""
    each = [settings_of(run) for run in runs]
    known = dict.fromkeys(name for one in each for name in one)
    others = [name for name in known if name not in named and _makes_a_group(name, each)]
    mixed = [name for name in others if any(_differs(name, members) for members in grouped)]
    if mixed:
        yield f"runs of one group differ, too, in {', '.join(mixed)}"
    confounded = [name for name in others if name not in mixed]
    if confounded:
        yield f"the groups differ, too, in {', '.join(confounded)}"


def _differs(name: str, runs: Sequence[ReportedRun]) -> bool:
    """Return True if a setting has several values in these runs."""
    return len({settings_of(run).get(name, ABSENT) for run in runs}) > 1


def _bootstrap_notes(scores: Sequence[list[SampleScores] | None], metric: str, take: str) -> list[str]:
    if all(each is None for each in scores):
        return []
    if take == "best":
        return ["no paired bootstrap: scores of samples are kept of the last validation, not of the best"]
    if any(each is None for each in scores):
        return [f"no paired bootstrap of some groups: runs without scores of the samples of {metric}"]
    every = [score for each in scores if each is not None for score in each]
    if not all(every[0].is_of_the_same(other) for other in every):
        return ["no paired bootstrap of some groups: their runs were validated on other samples"]
    return []


def _finite(value: Any) -> Any:
    """Return plain values in which JSON's missing words are None."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
