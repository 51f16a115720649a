"""Where the time of a run went, per epoch and rank, and how fast it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.callback import Record
from paceline.observe.report.figure import PHASE_COLORS, Figure, Trace, axis, color, line
from paceline.observe.report.findings import ranges
from paceline.observe.report.runs import RunRecord
from paceline.observe.report.series import short, thin

DOTS_UP_TO = 40
BARS_IN_HALF = 8
MOST_EPOCHS = 300
"""That are drawn as bars; of more, every n-th."""
MOST_BARS = 60
"""Epochs times ranks that are drawn one by one; beyond it, the mean over the ranks."""
NUMBERS = {
    "objects_per_s": ("Samples per second", "Over all ranks, in the time of the slowest.", "samples/s", 1.0),
    "padding": ("Padding", "Share of a batch that holds nothing.", "%", 100.0),
    "computing": ("Computing time", "Share of the ranks' time in which they did not wait for data.", "%", 100.0),
    "mfu": ("Model FLOPs utilisation", "What the model needs, of what the devices could do at most.", "%", 100.0),
    "flops_per_s": ("Arithmetic", "What the model needs, over all ranks.", "TFLOP/s", 1e-12),
    "host_bytes": ("Host memory", "Of the rank that needed most, the most so far.", "GiB", 2.0**-30),
    "device_bytes": ("Device memory", "Of the rank that needed most, the most so far.", "GiB", 2.0**-30),
}
"""Numbers of an epoch: title, what it is, unit, factor."""
_NOT_DRAWN = ("kind", "step", "epoch", "steps", "loss", "skipped", "samples", "stage")


def spent(runs: Sequence[RunRecord]) -> list[Figure]:
    """Time splits of each run, then speed of all of them beside each other."""
    figures = []
    for number, run in enumerate(runs):
        timed = [epoch for epoch in run.epochs if epoch.get("seconds")]
        if timed:
            figures += [_by_epoch(run, timed, number, len(runs)), *_by_rank(run, timed, number, len(runs))]
    return [*figures, *numbers(runs)]


def whole(epoch: Record) -> list[dict[str, float]]:
    """By rank: seconds by phase of an epoch and of the time since the last one, where that was written down."""
    between = epoch.get("between") or [{} for _ in epoch["seconds"]]
    return [_sum(pair) for pair in zip(epoch["seconds"], between, strict=True)]


def numbers_of(epoch: Record) -> dict[str, float]:
    """All numbers of an epoch that are worth a curve, by name."""
    memory = epoch.get("memory") or []
    kinds = dict.fromkeys(kind for rank in memory for kind, value in rank.items() if value)
    most = {kind: max(rank.get(kind) or 0 for rank in memory) for kind in kinds}
    found = {**epoch, **(epoch.get("rates") or {}), **most}
    return {name: value for name, value in found.items() if _is_number(value) and name not in _NOT_DRAWN}


def phases(seconds: Sequence[Mapping[str, float]]) -> list[str]:
    """The phases that took time, the larger ones first where they are not in the usual order."""
    used = {phase for rank in seconds for phase, value in rank.items() if value}
    return [phase for phase in PHASE_COLORS if phase in used] + sorted(used - PHASE_COLORS.keys())


def _by_epoch(run: RunRecord, epochs: Sequence[Record], number: int, num_runs: int) -> Figure:
    num_ranks = max(len(epoch["seconds"]) for epoch in epochs)
    is_each = num_ranks > 1 and len(epochs) * num_ranks <= MOST_BARS
    bars: list[tuple[str, str, Mapping[str, float]]] = []
    stride = -(-len(epochs) // MOST_EPOCHS)
    for epoch in epochs[::stride]:
        label = f"epoch {epoch['epoch'] + 1}" if "stage" not in epoch else f"{epoch['stage']}, {epoch['epoch'] + 1}"
        label = label if is_each or "stage" in epoch else str(epoch["epoch"] + 1)
        if is_each:
            bars += [(label, f"rank {rank}", seconds) for rank, seconds in enumerate(whole(epoch))]
        else:
            bars.append((label, "", _mean(whole(epoch))))
    x: Any = [[bar[0] for bar in bars], [bar[1] for bar in bars]] if is_each else [bar[0] for bar in bars]
    traces = [
        _bar(phase, x, [short(seconds.get(phase, 0.0)) for _, _, seconds in bars], "%{y:.3g} s")
        for phase in phases([seconds for _, _, seconds in bars])
    ]
    which = "each epoch" if stride == 1 else f"one epoch in {stride}"
    who = "on each rank" if is_each else "mean over the ranks" if num_ranks > 1 else "on one rank"
    resumed = [place for place, epoch in enumerate(epochs, 1) if epoch.get("launch")]
    lost = f" Resumed within epoch {ranges(resumed)}: without what was lost and done again." if resumed else ""
    return Figure(
        f"time-epochs-{number}",
        f"Time by epoch{_of(run, num_runs)}",
        traces,
        {"barmode": "stack", "xaxis": axis("" if is_each else "epoch", type=None if not is_each else "multicategory")},
        f"Seconds of {which}, {who}, with what came just before it: the last one's validation and checkpoint.{lost}",
        size="wide" if len(bars) > BARS_IN_HALF else "half",
    )


def _by_rank(run: RunRecord, epochs: Sequence[Record], number: int, num_runs: int) -> list[Figure]:
    """Shares over the whole run: a rank that waits less for the others is the one they wait for."""
    num_ranks = min(len(epoch["seconds"]) for epoch in epochs)
    if num_ranks < 2:
        return []
    ranks = [_sum([whole(epoch)[rank] for epoch in epochs]) for rank in range(num_ranks)]
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
    return [Figure(f"time-ranks-{number}", f"Time by rank{_of(run, num_runs)}", traces, layout, about)]


def numbers(runs: Sequence[RunRecord]) -> list[Figure]:
    """Every number that epochs have: speed, padding, and what else the clock found."""
    every = [[numbers_of(epoch) for epoch in run.epochs] for run in runs]
    found = dict.fromkeys(name for epochs in every for epoch in epochs for name in epoch)
    if all(epoch.get("objects_per_s") in (epoch.get("rates") or {}).values() for run in runs for epoch in run.epochs):
        found.pop("objects_per_s", None)  # samples have a better name
    figures = []
    rates = [name for run in runs for epoch in run.epochs for name in epoch.get("rates") or {}]
    for name in dict.fromkeys([*(name for name in [*rates, *NUMBERS] if name in found), *found]):
        title, about, unit, factor = NUMBERS.get(name, (_title(name), "", "", 1.0))
        traces: list[Trace] = []
        for number, (run, epochs) in enumerate(zip(runs, every, strict=True)):
            points = [(place, short(factor * epoch[name])) for place, epoch in enumerate(epochs, 1) if name in epoch]
            kept = [points[place] for place in thin([value for _, value in points])]
            x, y = [place for place, _ in kept], [value for _, value in kept]
            if points:
                traces.append(line(x, y, run.name, color(number), dots=len(points) <= DOTS_UP_TO))
        layout = {
            "xaxis": axis("epoch", dtick=max(1, round(max(len(epochs) for epochs in every) / 10))),
            "yaxis": axis(unit, rangemode="tozero"),
            "showlegend": len(runs) > 1,
        }
        figures.append(Figure(f"number-{name}", title, traces, layout, about, size="small"))
    return figures


def _bar(phase: str, at: Any, values: Sequence[float | None], shown: str, *, is_lying: bool = False) -> Trace:
    return {
        "type": "bar",
        "name": phase,
        "x": list(values) if is_lying else at,
        "y": at if is_lying else list(values),
        "orientation": "h" if is_lying else "v",
        "marker": {"color": PHASE_COLORS.get(phase, "#8b949e")},
        "hovertemplate": f"{phase} {shown}<extra></extra>",
    }


def _title(name: str) -> str:
    """`tokens_per_s` as `Tokens per second`."""
    words = name.replace("_", " ").capitalize()
    return words.removesuffix(" s") + " second" if words.endswith(" per s") else words


def _of(run: RunRecord, num_runs: int) -> str:
    return f": {run.name}" if num_runs > 1 else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sum(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) or 0.0 for row in rows) for name in names}


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: value / len(rows) for name, value in _sum(rows).items()}
