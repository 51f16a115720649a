"""Time of a run by epoch and rank, and its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.core.language import translate
from paceline.core.units import ranges
from paceline.observe.epoch import RankEpoch
from paceline.observe.records import EpochRecord, Memory, Number, declared_numbers
from paceline.observe.report.figure import PHASE_COLORS, Figure, Trace, axis, color, line
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.series import short, thin

DOTS_UP_TO = 40
BARS_IN_HALF = 8
MOST_EPOCHS = 300
"""Epochs that are drawn as bars; of more, every n-th."""
MOST_BARS = 60
"""Epochs times ranks that are drawn one by one; beyond it, the mean over the ranks."""
NUMBERS = declared_numbers(EpochRecord, Memory, RankEpoch)
"""Numbers of an epoch that have a title and a unit, in their order on the page."""


def spent(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Plot the time of each run, then the speed of all of them beside each other."""
    figures = []
    for number, run in enumerate(runs):
        timed = [epoch for epoch in run.epochs if epoch.seconds]
        if timed:
            figures += [_by_epoch(run, timed, number, len(runs)), *_by_rank(run, timed, number, len(runs))]
    return [*figures, *numbers(runs)]


def with_between(epoch: EpochRecord) -> list[dict[str, float]]:
    """Return, by rank, seconds by phase of an epoch and of the time since the last one, where that is recorded."""
    between = epoch.between or [{} for _ in epoch.seconds]
    return [_sum(pair) for pair in zip(epoch.seconds, between, strict=True)]


def phases(seconds: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the phases that took time, in the usual order; unknown ones come last."""
    used = {phase for rank in seconds for phase, value in rank.items() if value}
    return [phase for phase in PHASE_COLORS if phase in used] + sorted(used - PHASE_COLORS.keys())


class _Bar(NamedTuple):
    epoch: str
    rank: str
    """Empty where a bar is the mean over ranks."""
    seconds: Mapping[str, float]


def _bars(epochs: Sequence[EpochRecord], is_each: bool) -> list[_Bar]:
    """Return a bar for each epoch, or for each rank of it."""
    bars = []
    for epoch in epochs:
        number = str(epoch.epoch)
        label = number if epoch.stage is None else f"{epoch.stage}, {number}"
        ranks = with_between(epoch)
        if not is_each:
            bars.append(_Bar(label, "", _mean(ranks)))
            continue
        label = f"{translate('epoch')} {number}" if epoch.stage is None else label
        bars += [_Bar(label, f"rank {rank}", seconds) for rank, seconds in enumerate(ranks)]
    return bars


def _by_epoch(run: ReportedRun, epochs: Sequence[EpochRecord], number: int, num_runs: int) -> Figure:
    num_ranks = max(len(epoch.seconds) for epoch in epochs)
    is_each = num_ranks > 1 and len(epochs) * num_ranks <= MOST_BARS
    stride = -(-len(epochs) // MOST_EPOCHS)
    bars = _bars(epochs[::stride], is_each)
    labels = [bar.epoch for bar in bars]
    x = [labels, [bar.rank for bar in bars]] if is_each else labels
    traces = [
        _bar(phase, x, [short(bar.seconds.get(phase, 0.0)) for bar in bars], "%{y:.3g} s")
        for phase in phases([bar.seconds for bar in bars])
    ]
    mean = translate("mean over the ranks") if num_ranks > 1 else translate("on one rank")
    who = translate("on each rank") if is_each else mean
    return Figure(
        f"time-epochs-{number}",
        translate("Time by epoch") + _of(run, num_runs),
        traces,
        {"barmode": "stack", "xaxis": axis("", type="multicategory") if is_each else axis("epoch", type=None)},
        _about(epochs, stride, who),
        size="wide" if len(bars) > BARS_IN_HALF else "half",
    )


def _about(epochs: Sequence[EpochRecord], stride: int, who: str) -> str:
    which = translate("each epoch") if stride == 1 else translate("one epoch in {number}").format(number=stride)
    resumed = [place for place, epoch in enumerate(epochs, 1) if epoch.launch is not None]
    lost = translate(" Resumed within epoch {epochs}: without what was lost and done again.").format(
        epochs=ranges(resumed)
    )
    text = translate(
        "Seconds of {which}, {who}, with what came just before it: the last one's validation and checkpoint."
    )
    return text.format(which=which, who=who) + (lost if resumed else "")


def _by_rank(run: ReportedRun, epochs: Sequence[EpochRecord], number: int, num_runs: int) -> list[Figure]:
    """Plot shares over the whole run: a rank that waits less for the others is the one they wait for."""
    num_ranks = min(len(epoch.seconds) for epoch in epochs)
    if num_ranks < 2:
        return []
    ranks = [_sum([with_between(epoch)[rank] for epoch in epochs]) for rank in range(num_ranks)]
    names = [f"rank {rank}" for rank in range(num_ranks)]
    traces = []
    for phase in phases(ranks):
        shares = [short(100 * rank.get(phase, 0.0) / (sum(rank.values()) or 1.0)) for rank in ranks]
        traces.append(_bar(phase, names, shares, "%{x:.3g} %", is_lying=True))
    layout = {
        "barmode": "stack",
        "xaxis": axis("% of the rank's time", range=[0, 100]),
        "yaxis": {"autorange": "reversed"},
        "height": max(220, 130 + 26 * num_ranks),
    }
    about = "Over all epochs. The rank that waits least for the others (communication) is the one they wait for."
    return [Figure(f"time-ranks-{number}", translate("Time by rank") + _of(run, num_runs), traces, layout, about)]


def numbers(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Plot every number that epochs have: speed, padding, memory, and unknown ones under their own name."""
    by_run = [[dict(epoch.numbers()) for epoch in run.epochs] for run in runs]
    names = dict.fromkeys(name for epochs in by_run for epoch in epochs for name in epoch)
    every_epoch = [epoch for run in runs for epoch in run.epochs]
    if all(epoch.objects_per_s in epoch.rates.values() for epoch in every_epoch):
        names.pop("objects_per_s", None)  # samples have a better name
    first = [*(name for epoch in every_epoch for name in epoch.rates), *NUMBERS]
    ordered = dict.fromkeys([*(name for name in first if name in names), *names])
    dtick = max(1, round(max(len(epochs) for epochs in by_run) / 10))
    return [_number(name, runs, by_run, dtick) for name in ordered]


def _number(
    name: str, runs: Sequence[ReportedRun], by_run: Sequence[Sequence[Mapping[str, float]]], dtick: int
) -> Figure:
    number = NUMBERS.get(name) or Number(_title(name))
    traces: list[Trace] = []
    for place, (run, epochs) in enumerate(zip(runs, by_run, strict=True)):
        points = [(x, short(number.factor * epoch[name])) for x, epoch in enumerate(epochs, 1) if name in epoch]
        shown = [points[index] for index in thin([y for _, y in points])]
        if points:
            xs, ys = [x for x, _ in shown], [y for _, y in shown]
            traces.append(line(xs, ys, run.name, color(place), dots=len(points) <= DOTS_UP_TO))
    layout = {
        "xaxis": axis("epoch", dtick=dtick),
        "yaxis": axis(number.unit, rangemode="tozero"),
        "showlegend": len(runs) > 1,
    }
    return Figure(f"number-{name}", number.title, traces, layout, number.about, size="small")


def _bar(phase: str, at: Any, values: Sequence[float | None], shown: str, *, is_lying: bool = False) -> Trace:
    return {
        "type": "bar",
        "name": translate(phase),
        "x": list(values) if is_lying else at,
        "y": at if is_lying else list(values),
        "orientation": "h" if is_lying else "v",
        "marker": {"color": PHASE_COLORS.get(phase, "#8b949e")},
        "hovertemplate": f"{translate(phase)} {shown}<extra></extra>",
    }


def _title(name: str) -> str:
    """Return `tokens_per_s` as `Tokens per second`."""
    words = name.replace("_", " ").capitalize()
    return words.removesuffix(" s") + " second" if words.endswith(" per s") else words


def _of(run: ReportedRun, num_runs: int) -> str:
    return f": {run.name}" if num_runs > 1 else ""


def _sum(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) or 0.0 for row in rows) for name in names}


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: value / len(rows) for name, value in _sum(rows).items()}
