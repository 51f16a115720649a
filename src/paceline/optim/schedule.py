"""Learning-rate schedules: pure functions of the step, counted from 0.

Formulas after NeMo's lr_policies, OpenSeq2Seq (exponential, piecewise, Noam) and RETURNN (newbob). All but Noam warm up
alike: lr * (step + 1) / (warmup_steps + 1) while step < warmup_steps. Those that fall until the end of the run stay at
`min_lr` after it (NeMo falls to 0 there, below its own minimum). A new schedule is a function of `Span` and step, and a
line in `SCHEDULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from paceline.config.settings import OptimSettings
from paceline.core import plugins
from paceline.core.errors import InvalidSetting, PacelineError
from paceline.core.together import Exclusion


class MinLrAboveLr(PacelineError):
    """A floor above the peak: the schedule would rise instead of fall."""

    peak: float
    min_lr: float
    peak_name: str = "lr"
    sentence = "min_lr {min_lr:g} is above {peak_name} {peak:g}"
    hint = "set `min_lr` below it"


class ScheduleNeedsEnd(PacelineError):
    """Something that depends on the last step, in a run whose last step is not known."""

    what: str
    excludes = (
        Exclusion(
            "a schedule that falls to the end, `--warmup-ratio`",
            "data of unknown length without `--steps`",
            "mathematics",
            "The last step is not known.",
        ),
    )
    sentence = "{what} needs to know how many steps the run has"
    hint = "set `steps`, or `schedule: constant` with `warmup_steps`"


class ScoresMissing(PacelineError):
    """Newbob in a run that never validates."""

    excludes = (
        Exclusion(
            "`--schedule newbob`",
            "a run without validation",
            "mathematics",
            "It follows the scores.",
        ),
    )
    sentence = "schedule 'newbob' follows the scores of validation, and this run has none"
    hint = "give the task validation sets (`val_data`) and validate in training, or choose another `schedule`"


@dataclass(frozen=True)
class Span:
    """From which learning rate to which, in which way, and over which steps."""

    settings: OptimSettings
    warmup_steps: int
    total_steps: int
    """0 where it is not known, for schedules that do not depend on it."""
    scores: Callable[[], Sequence[float]] = tuple
    """Returns the scores of the validations so far, lower is better."""

    def progress(self, step: int, hold_steps: int = 0) -> float:
        """0 at the end of the warm-up (and of the hold after it), 1 at the end of the run and after it."""
        if step >= self.total_steps:
            return 1.0
        begin = self.warmup_steps + hold_steps
        return (step - begin) / (self.total_steps - begin) if step > begin else 0.0

    def between(self, share: float) -> float:
        """`lr` for 1, `min_lr` for 0."""
        return (self.settings.lr - self.settings.min_lr) * share + self.settings.min_lr

    def at_least(self, rate: float) -> float:
        return max(rate, self.settings.min_lr)


def constant(span: Span, step: int) -> float:
    return span.settings.lr


def cosine(span: Span, step: int) -> float:
    """Half a cosine from lr to min_lr."""
    return span.between(0.5 * (1.0 + math.cos(math.pi * span.progress(step))))


def linear(span: Span, step: int) -> float:
    """A straight line from lr to min_lr."""
    return span.between(1.0 - span.progress(step))


def square(span: Span, step: int) -> float:
    """lr times the squared share of what is left, min_lr at least."""
    return span.at_least(span.settings.lr * (1.0 - span.progress(step)) ** 2)


def sqrt(span: Span, step: int) -> float:
    """lr times the root of the share of what is left, min_lr at least.

    What is left is counted from the end of the warm-up as everywhere else; NeMo's counts from step 0, and so falls by
    a jump where the warm-up ends.
    """
    return span.at_least(span.settings.lr * math.sqrt(1.0 - span.progress(step)))


def inverse_sqrt(span: Span, step: int) -> float:
    """lr * sqrt((warmup_steps + 1) / (step + 1)), min_lr at least."""
    return span.at_least(span.settings.lr * math.sqrt((span.warmup_steps + 1) / (step + 1)))


def polynomial(span: Span, step: int) -> float:
    """lr for `hold_steps`, then to min_lr by the `power` of the share of what is left."""
    left = 1.0 - span.progress(step, span.settings.hold_steps)
    return span.between(left**span.settings.power)


def exponential(span: Span, step: int) -> float:
    """lr for `hold_steps`, then times `decay` per `decay_steps`, smoothly; min_lr at least."""
    since = max(0, step - span.warmup_steps - span.settings.hold_steps)
    return span.at_least(span.settings.lr * span.settings.decay ** (since / (span.settings.decay_steps or 1)))


def piecewise(span: Span, step: int) -> float:
    """lr times `decay` for each of the `milestones` reached (counted from step 0), min_lr at least."""
    reached = sum(step >= milestone for milestone in span.settings.milestones)
    return span.at_least(span.settings.lr * span.settings.decay**reached)


def noam(span: Span, step: int) -> float:
    """lr / sqrt(model_size) * min((step + 1) * warmup_steps ** -1.5, (step + 1) ** -0.5); then min_lr at least.

    `lr` is a factor here: the peak, at the end of the warm-up, is lr / sqrt(model_size * warmup_steps).
    """
    factor = span.settings.lr / math.sqrt(span.settings.model_size or 1)
    if step < span.warmup_steps:
        return factor * (step + 1) * math.pow(span.warmup_steps, -1.5)
    return span.at_least(factor / math.sqrt(step + 1))


def newbob(scores: Sequence[float], lr: float, decay: float, threshold: float, min_lr: float) -> float:
    """lr times `decay` for each score (lower is better) that was not better than the one before by `threshold`.

    Better by (before - now) / |now|, RETURNN's relative error with the other sign. Not a number is worse than any.
    """
    rate = lr
    for before, now in pairwise(scores):
        gain = (math.inf if math.isnan(before) else before) - now
        # Multiplied out, for the sake of a score that is 0: then only a true gain counts.
        is_better = gain >= threshold * abs(now) and (now != 0 or gain > 0)
        rate = rate if is_better else max(rate * decay, min_lr)
    return rate


_newbob_before = lru_cache(maxsize=1)(newbob)
"""Scores are few, steps are many."""


def _newbob(span: Span, step: int) -> float:
    settings = span.settings
    return _newbob_before(tuple(span.scores()), settings.lr, settings.decay, settings.newbob_threshold, settings.min_lr)


ANY_OPTION: frozenset[str] = frozenset({"*"})
"""Options of a schedule of which only the formula is known."""


@dataclass(frozen=True)
class Schedule:
    """A schedule's formula, the options beside `lr` and warm-up that it heeds, and what it cannot do without."""

    rate: Callable[[Span, int], float]
    options: frozenset[str] = frozenset({"min_lr"})
    needs_end: bool = False
    needs: tuple[str, str] | None = None
    """An option without default, and an example of it."""
    has_own_warmup: bool = False


SCHEDULES: dict[str, Schedule] = {
    "constant": Schedule(constant, options=frozenset()),
    "cosine": Schedule(cosine, needs_end=True),
    "square": Schedule(square, needs_end=True),
    "sqrt": Schedule(sqrt, needs_end=True),
    "linear": Schedule(linear, needs_end=True),
    "inverse-sqrt": Schedule(inverse_sqrt),
    "polynomial": Schedule(polynomial, frozenset({"min_lr", "power", "hold_steps"}), needs_end=True),
    "exponential": Schedule(
        exponential, frozenset({"min_lr", "decay", "decay_steps", "hold_steps"}), needs=("decay_steps", "1000")
    ),
    "piecewise": Schedule(piecewise, frozenset({"min_lr", "decay", "milestones"}), needs=("milestones", "1000 2000")),
    "noam": Schedule(noam, frozenset({"min_lr", "model_size"}), needs=("model_size", "512"), has_own_warmup=True),
    "newbob": Schedule(_newbob, frozenset({"min_lr", "decay", "newbob_threshold"})),
}


def schedule_of(name: str) -> Schedule:
    """Return the schedule of this name: ours, or one that a plugin brings, as a `Schedule` or as its formula."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    plugin = plugins.find("schedules", name)
    assert plugin is not None, "the settings were checked"
    value = plugins.load(plugin)
    if isinstance(value, Schedule):
        return replace(value, rate=_guarded(plugin, value.rate))
    if isinstance(value, type) or not callable(value):
        raise plugins.unfit(plugin, value, "a function of (span, step), or a paceline.plugins.Schedule")
    return Schedule(_guarded(plugin, value), options=ANY_OPTION)


def _guarded(plugin: plugins.Plugin, rate: Callable[[Span, int], float]) -> Callable[[Span, int], float]:
    """Return a plugin's formula whose mistakes are said with its package's name."""

    def checked(span: Span, step: int) -> float:
        value = plugins.guarded(plugin, f"fails at step {step}", lambda: float(rate(span, step)))
        if not (math.isfinite(value) and value >= 0):
            raise plugins.PluginFails(plugin.title, f"fails at step {step}", f"its learning rate is {value}")
        return value

    return checked


def build(
    settings: OptimSettings, total_steps: int | None, scores: Callable[[], Sequence[float]] | None = None
) -> Callable[[int], float]:
    """The learning rate as a function of the step; `total_steps` is None where it is not known.

    `scores` returns the scores of the validations since the schedule began, lower is better; None in a run that does
    not validate. Only newbob calls it.
    """
    chosen = schedule_of(settings.schedule)
    if chosen.needs_end and total_steps is None:
        raise ScheduleNeedsEnd(f"schedule {settings.schedule!r}")
    if chosen.needs is not None and not getattr(settings, chosen.needs[0]):
        option, example = chosen.needs
        raise InvalidSetting(
            f"schedule {settings.schedule!r} needs `{option}`",
            hint=f"set it, for example `--{option.replace('_', '-')} {example}`",
        )
    if settings.schedule == "newbob" and scores is None:
        raise ScoresMissing
    span = Span(settings, _warmup_steps(settings, total_steps), total_steps or 0, scores or tuple)
    _check_floor(span)
    if chosen.has_own_warmup:
        return lambda step: chosen.rate(span, step)

    def rate(step: int) -> float:
        if step < span.warmup_steps:
            return settings.lr * (step + 1) / (span.warmup_steps + 1)
        return chosen.rate(span, step)

    return rate


def users_of_options() -> dict[str, list[str]]:
    """Return, for each option that not every schedule heeds, the schedules that do."""
    users: dict[str, list[str]] = {}
    for name, schedule in SCHEDULES.items():
        for option in sorted(schedule.options):
            users.setdefault(option, []).append(name)
    return users


def heeds(name: str, option: str) -> bool:
    """Return True if the schedule of this name does something with an option, or if that is not known."""
    options = schedule_of(name).options
    return options is ANY_OPTION or option in options


def unused(settings: OptimSettings) -> list[str]:
    """Return the options that were set but have no effect in the chosen schedule."""
    idle = {option for option in users_of_options() if not heeds(settings.schedule, option)}
    fields = type(settings).model_fields
    return [name for name in fields if name in idle and getattr(settings, name) != fields[name].default]


def _warmup_steps(settings: OptimSettings, total_steps: int | None) -> int:
    if settings.warmup_ratio is None:
        return settings.warmup_steps
    if total_steps is None:
        raise ScheduleNeedsEnd("`warmup_ratio`")
    return round(settings.warmup_ratio * total_steps)


def _check_floor(span: Span) -> None:
    settings = span.settings
    if settings.schedule == "noam":
        peak = settings.lr / math.sqrt((settings.model_size or 1) * max(1, span.warmup_steps))
        if settings.min_lr > peak:
            raise MinLrAboveLr(peak, settings.min_lr, "Noam's highest rate")
    elif settings.schedule != "constant" and settings.min_lr > settings.lr:
        raise MinLrAboveLr(settings.lr, settings.min_lr)
