"""Time line of a run's ranks, where those that survive another's death go on: who was lost, who has joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.core.language import translate
from paceline.core.units import worded
from paceline.observe.report.figure import Figure, Trace, axis, color, line
from paceline.observe.report.findings import Held
from paceline.observe.report.runs import ReportedRun


def time_lines(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Return a plot of the number of ranks by step, of runs whose ranks have changed."""
    traces: list[Trace] = []
    for number, run in enumerate(runs):
        if len(run.ranks) < 2:
            continue
        steps = [record.step for record in run.ranks]
        sizes: list[float | None] = [record.ranks for record in run.ranks]
        trace = line([*steps, run.num_steps - 1], [*sizes, sizes[-1]], run.name, color(number), dots=True)
        trace["line"] |= {"shape": "hv"}
        trace |= {
            "text": [*map(_said, run.ranks), ""],
            "hovertemplate": f"{translate('step')} %{{x}}, {translate('ranks')}: %{{y}}<br>%{{text}}<extra></extra>",
        }
        traces.append(trace)
    if not traces:
        return []
    layout = {"xaxis": axis("step"), "yaxis": {**axis("ranks"), "rangemode": "tozero"}}
    about = "Ranks that train, from each change on: a rank was lost, or one has joined."
    return [Figure("ranks", "Ranks", traces, layout, about, size="wide")]


def losses(run: ReportedRun) -> list[Held]:
    """Return the ranks that were lost, the one that was lost most often first."""
    numbers = Counter((lost.get("rank"), str(lost.get("host"))) for record in run.ranks for lost in record.lost)
    if not numbers:
        return []
    seconds = sum(record.seconds for record in run.ranks if record.lost)
    repeated = sum(record.repeated for record in run.ranks)
    sums = {"deaths": sum(numbers.values()), "seconds": f"{seconds:.1f}", "steps": repeated}
    cost = worded(translate("{deaths:#death} cost {seconds} s and {steps:#repeated step}"), sums)
    held = []
    for (rank, host), number in numbers.most_common():
        where = {"rank": rank, "host": host, "number": number, "cost": cost}
        once, often = (
            translate("rank {rank} on {host} was lost once"),
            translate("rank {rank} on {host} was lost {number} times"),
        )
        text = worded(once if number == 1 else often, where)
        advice = translate("look at `dmesg` of {host}, and at `logs/rank-{rank}.log`; in all, {cost}")
        held.append(Held("lost", text, worded(advice, where), 0.0, (), len(run.epochs)))
    return held


def _said(record: Any) -> str:
    gone, come = translate("rank {rank} on {host} was lost"), translate("rank {rank} on {host} joined")
    lost = [gone.format(rank=each.get("rank"), host=each.get("host")) for each in record.lost]
    joined = [come.format(rank=each.get("rank"), host=each.get("host")) for each in record.joined]
    return "<br>".join([*lost, *joined])
