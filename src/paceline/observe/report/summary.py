"""Summary of runs in a few numbers, at the head of the page."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.language import translate
from paceline.core.units import worded
from paceline.observe.progress import clock_time
from paceline.observe.records import ValidationRecord
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.section import Fact
from paceline.observe.report.times import with_between


def facts(run: ReportedRun) -> list[Fact]:
    """Return a run in a few numbers; those that it does not know are left out."""
    of_recipes = [fact for recipe in run.recipes for fact in recipe.facts(run)]
    return [*_goal(run), *of_recipes, _loss(run), _length(run), *_speed(run), *_machine(run)]


def best(run: ReportedRun) -> tuple[float, int] | None:
    """Return the best value of the monitored metric, and its step."""
    monitor = run.monitor or ""
    scored = [(record.metrics[monitor], record.step) for record in run.validations if _has(record, monitor)]
    if not scored:
        return None
    sign = -1.0 if run.is_higher_better else 1.0
    return min(scored, key=lambda pair: (sign * pair[0], pair[1]))


def _has(record: ValidationRecord, monitor: str) -> bool:
    return isinstance(record.metrics.get(monitor), int | float)


def _goal(run: ReportedRun) -> list[Fact]:
    best_score, monitor = best(run), run.monitor
    if best_score is None or monitor is None:
        return []
    value, step = best_score
    last = [record.metrics[monitor] for record in run.validations if _has(record, monitor)][-1]
    end = translate("; {score} at the end").format(score=score(run, monitor, last))
    note = translate("after step {step:,}").format(step=step + 1) + ("" if last == value else end)
    return [Fact(translate("best {metric}").format(metric=monitor), score(run, monitor, value), note)]


def _loss(run: ReportedRun) -> Fact:
    value = run.steps[-1].loss
    began = run.steps[0].loss
    note = translate("{value} at the start").format(value=number(began)) if began is not None else ""
    return Fact(
        translate("training loss, last step"), translate("not finite") if value is None else number(value), note
    )


def _length(run: ReportedRun) -> Fact:
    num_epochs = len(run.epochs)
    text = translate("{epochs:#epoch} in {time}") if num_epochs else translate("{epochs:#epoch} ended so far")
    note = worded(text, {"epochs": num_epochs, "time": clock_time(training_s(run)) if num_epochs else ""})
    return Fact(translate("steps"), f"{run.num_steps:,}", note)


def _speed(run: ReportedRun) -> list[Fact]:
    facts = []
    speeds = [epoch.objects_per_s for epoch in run.epochs if epoch.objects_per_s]
    if speeds:
        note = translate("first epoch {speed}").format(speed=number(speeds[0])) if len(speeds) > 1 else ""
        rates = run.epochs[-1].rates
        unit = next((name.removesuffix("_per_s") for name, rate in rates.items() if rate == speeds[-1]), "samples")
        facts.append(Fact(translate("{unit}/s, last epoch").format(unit=translate(unit)), number(speeds[-1]), note))
    share = computing(run)
    if share is not None:
        facts.append(Fact(translate("computing time"), f"{100 * share:.1f} %", translate("the rest waited for data")))
    paddings = [epoch.padding for epoch in run.epochs if epoch.padding is not None]
    if paddings:
        facts.append(
            Fact(translate("padding"), f"{100 * paddings[-1]:.1f} %", translate("of the last epoch's batches"))
        )
    return facts


def _machine(run: ReportedRun) -> list[Fact]:
    settings, start = run.settings, (run.starts or [{}])[-1]
    level = settings.get("precision") or translate("level {level}").format(level=settings.get("level", "auto"))
    where = [str(part) for part in (start.get("host"), level) if part]
    if run.num_ranks is None:
        return []
    return [Fact(translate("ranks"), str(run.num_ranks), ", ".join(where))]


def training_s(run: ReportedRun) -> float:
    """Return the seconds of all epochs and between them, each on its slowest rank."""
    return sum(max(sum(rank.values()) for rank in with_between(epoch)) for epoch in run.epochs if epoch.seconds)


def computing(run: ReportedRun) -> float | None:
    """Return the share of all ranks' time in all epochs in which they did not wait for data."""
    ranks = [rank for epoch in run.epochs for rank in epoch.seconds]
    total = sum(sum(rank.values()) for rank in ranks)
    return 1 - sum(rank.get("data", 0.0) for rank in ranks) / total if total else None


def comparison(runs: Sequence[ReportedRun]) -> tuple[list[str], list[list[str]]]:
    """Return several runs as one table: column titles, and a row for each run."""
    every = [{fact.name: fact.value for fact in facts(run)} for run in runs]
    names = list(dict.fromkeys(name for row in every for name in row))
    rows = [
        [run.name, run.task, run.status, *(row.get(name, "") for name in names)]
        for run, row in zip(runs, every, strict=True)
    ]
    return [translate("run"), translate("task"), translate("status"), *names], rows


def number(value: float) -> str:
    """Return a number in few digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def score(run: ReportedRun, metric: str, value: float) -> str:
    """Return the value of a metric as it is shown."""
    return f"{100 * value:.2f} %" if run.is_percent(metric) else number(value)
