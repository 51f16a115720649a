"""The head of the page: what each run came to, in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.progress import clock_time
from paceline.observe.report.runs import RunRecord
from paceline.observe.report.times import whole


@dataclass(frozen=True)
class Fact:
    """A number, what it is, and what else should be known of it."""

    name: str
    value: str
    note: str = ""


def facts(run: RunRecord) -> list[Fact]:
    """A run in a few numbers; what it does not know is left out."""
    return [*_goal(run), *_continual(run), _loss(run), _length(run), *_speed(run), *_machine(run)]


def best(run: RunRecord) -> tuple[float, int] | None:
    """The best value of what is monitored, and the step after which it was found."""
    monitor = run.monitor or ""
    scored = [(record[monitor], int(record["step"])) for record in run.validations if _has(record, monitor)]
    if not scored:
        return None
    sign = -1.0 if run.is_higher_better else 1.0
    return min(scored, key=lambda pair: (sign * pair[0], pair[1]))


def _has(record: dict[str, object], monitor: str) -> bool:
    return isinstance(record.get(monitor), int | float)


def _goal(run: RunRecord) -> list[Fact]:
    found, monitor = best(run), run.monitor
    if found is None or monitor is None:
        return []
    value, step = found
    last = [record[monitor] for record in run.validations if _has(record, monitor)][-1]
    note = f"after step {step + 1:,}" + ("" if last == value else f"; {score(monitor, last)} at the end")
    return [Fact(f"best {monitor}", score(monitor, value), note)]


def _continual(run: RunRecord) -> list[Fact]:
    """Mean accuracy over the tasks at the end, in percent, and how much of it was forgotten."""
    found = run.continual or {}
    facts = []
    for kind, name in (("class_il", "class-IL accuracy"), ("task_il", "task-IL accuracy")):
        forgotten = found.get(f"{kind}_forgetting")
        if isinstance(found.get(kind), int | float):
            note = "" if forgotten is None else f"{forgotten:.1f} % forgotten"
            facts.append(Fact(name, f"{found[kind]:.2f} %", note))
    return facts


def _loss(run: RunRecord) -> Fact:
    value = run.steps[-1].get("loss")
    began = run.steps[0].get("loss")
    note = f"{number(began)} at the start" if began is not None else ""
    return Fact("training loss, last step", "not finite" if value is None else number(value), note)


def _length(run: RunRecord) -> Fact:
    num_epochs = len(run.epochs)
    note = f"{num_epochs} epoch{'s' * (num_epochs != 1)}" + (
        f" in {clock_time(training_s(run))}" if num_epochs else " ended so far"
    )
    return Fact("steps", f"{run.num_steps:,}", note)


def _speed(run: RunRecord) -> list[Fact]:
    found = []
    speeds = [epoch["objects_per_s"] for epoch in run.epochs if epoch.get("objects_per_s")]
    if speeds:
        note = f"first epoch {number(speeds[0])}" if len(speeds) > 1 else ""
        rates = run.epochs[-1].get("rates") or {}
        unit = next((name.removesuffix("_per_s") for name, rate in rates.items() if rate == speeds[-1]), "samples")
        found.append(Fact(f"{unit}/s, last epoch", number(speeds[-1]), note))
    share = computing(run)
    if share is not None:
        found.append(Fact("computing time", f"{100 * share:.1f} %", "the rest waited for data"))
    paddings = [epoch["padding"] for epoch in run.epochs if epoch.get("padding") is not None]
    if paddings:
        found.append(Fact("padding", f"{100 * paddings[-1]:.1f} %", "of the last epoch's batches"))
    return found


def _machine(run: RunRecord) -> list[Fact]:
    settings, start = run.settings, (run.starts or [{}])[-1]
    level = settings.get("precision") or f"level {settings.get('level', 'auto')}"
    where = [str(part) for part in (start.get("host"), level) if part]
    if run.num_ranks is None:
        return []
    return [Fact("ranks", str(run.num_ranks), ", ".join(where))]


def training_s(run: RunRecord) -> float:
    """Of all epochs and between them, each on its slowest rank."""
    return sum(max(sum(rank.values()) for rank in whole(epoch)) for epoch in run.epochs if epoch.get("seconds"))


def computing(run: RunRecord) -> float | None:
    """Share of all ranks' time in all epochs in which they did not wait for data."""
    ranks = [rank for epoch in run.epochs for rank in epoch.get("seconds") or []]
    total = sum(sum(rank.values()) for rank in ranks)
    return 1 - sum(rank.get("data", 0.0) for rank in ranks) / total if total else None


def comparison(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Several runs in one table: column titles, and a row for each run."""
    every = [{fact.name: fact.value for fact in facts(run)} for run in runs]
    names = list(dict.fromkeys(name for row in every for name in row))
    rows = [
        [run.name, run.task, run.status, *(row.get(name, "") for name in names)]
        for run, row in zip(runs, every, strict=True)
    ]
    return ["run", "task", "status", *names], rows


def number(value: float) -> str:
    """As short as it can be read."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def score(metric: str, value: float) -> str:
    """A metric's value; error rates in percent."""
    return f"{100 * value:.2f} %" if metric.endswith(("/wer", "/cer")) else number(value)
