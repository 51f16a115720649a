"""Settings that a sweep searches, and their values: `lr=1e-5:1e-1:log`, `hidden=16,32,64`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.config.command_line import resolve
from paceline.config.parse import convert, variants
from paceline.config.problems import Problem, SettingsInvalid, nearest
from paceline.config.python_call import CallInvalid, settings_of_call
from paceline.config.settings import TrainConfig

Value = str | int | float | bool | None
Asked = Mapping[str, str | Sequence[Value]]
"""Values by setting: text as on the command line, or the choices themselves."""
FORM = "write NAME=LOW:HIGH, NAME=LOW:HIGH:log, or NAME=A,B,C"
KEPT = (
    *("out", "resume", "exp_name", "runs_dir", "allow_change", "init_from", "device", "threads"),
    *("benchmark", "validation", "monitor", "monitor_mode", "loggers", "progress", "profile"),
)
"""Settings that are the same in all trials, as they say where a trial lives or how it is judged."""


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included."""

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}{':log' if self.is_log else ''}"

    @property
    def ends(self) -> tuple[Value, ...]:
        return (int(self.low), int(self.high)) if self.is_whole else (self.low, self.high)


@dataclass(frozen=True)
class Choices:
    """Some values."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return ",".join("none" if value is None else str(value) for value in self.values)

    @property
    def ends(self) -> tuple[Value, ...]:
        return self.values


Dimension = Range | Choices
Space = Mapping[str, Dimension]


def read_words(words: Sequence[str], prog: str) -> dict[str, str]:
    """Return the values by setting of words such as `lr=1e-5:1e-1:log`; one without a name goes on with the last."""
    whole: list[str] = []
    for word in words:
        if "=" in word or not whole:
            whole.append(word)
        else:
            whole[-1] += f",{word}"  # commas also separate the words of an option
    pairs = [word.partition("=") for word in whole]
    names = [name.strip().replace("-", "_") for name, _, _ in pairs]
    wrong = [
        Problem("--search", "is not of the form NAME=VALUES", FORM, word)
        for word, (name, _, values) in zip(whole, pairs, strict=True)
        if not name or not values
    ]
    twice = sorted({name for name in names if names.count(name) > 1})
    wrong += [Problem("--search", f"{name} is there twice", "keep one of them") for name in twice]
    if wrong:
        raise SettingsInvalid(wrong, prog)
    return {name: values for name, (_, _, values) in zip(names, pairs, strict=True)}


def space_of(model: type[TrainConfig], asked: Asked, given: Mapping[str, object], prog: str) -> dict[str, Dimension]:
    """Return the dimensions of a search; all mistakes at once. `given` are the settings that all trials share."""
    problems: list[Problem] = []
    space: dict[str, Dimension] = {}
    if not asked:
        problems.append(Problem("--search", "nothing to search is named", FORM))
    for typed, values in asked.items():
        name = resolve(model, typed)
        shown = values if isinstance(values, str) else ",".join(map(str, values))
        if name is None or name in KEPT:
            meant = nearest(typed, [each for each in model.model_fields if each not in KEPT])
            what = "there is no such setting" if name is None else "is the same in all trials"
            hint = f"did you mean {meant}?" if meant and name is None else ""
            problems.append(Problem(f"--search {typed}", what, hint, shown))
            continue
        if name in given:
            what = f"is searched and also set to {given[name]}"
            problems.append(Problem(f"--search {typed}", what, "leave one of them out", shown))
            continue
        try:
            space[name] = _dimension(model, name, values)
        except ValueError as error:
            problems.append(Problem(f"--search {typed}", str(error), FORM, shown))
    problems += _refused(model, space, given)
    if problems:
        raise SettingsInvalid(problems, prog)
    return space


def _dimension(model: type[TrainConfig], name: str, values: str | Sequence[Value]) -> Dimension:
    annotation = model.model_fields[name].annotation
    if not isinstance(values, str):
        return _choices(list(values))
    if ":" in values:
        return _range(values, is_whole=float not in variants(annotation) and int in variants(annotation))
    entries = [convert(annotation, word.strip(), is_typed=True) for word in values.split(",")]
    return _choices([_number(each, annotation) if isinstance(each, str) else each for each in entries])


def _choices(values: list[Value]) -> Choices:
    if not all(isinstance(value, str | int | float | bool | None) for value in values):
        raise ValueError("has a choice that is no number, text, true, false or none")
    if len(dict.fromkeys(values)) < 2:
        raise ValueError("needs at least two different values")
    return Choices(tuple(dict.fromkeys(values)))


def _range(text: str, *, is_whole: bool) -> Range:
    parts = text.split(":")
    is_log = parts[-1] == "log"
    numbers = parts[:-1] if is_log else parts
    try:
        low, high = (float(part) for part in numbers)
    except ValueError:
        raise ValueError("is no range of two numbers") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("must have a finite LOW below HIGH")
    if is_log and low <= 0:
        raise ValueError("must be above 0 for a logarithmic scale")
    if is_whole and not (low.is_integer() and high.is_integer()):
        raise ValueError("must be of whole numbers")
    return Range(low, high, is_log, is_whole)


def _number(word: str, annotation: object) -> Value:
    """Return a word as the number that a setting takes, else the word."""
    kinds = variants(annotation)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError:
                continue
    if bool in kinds and word.lower() in ("true", "yes", "false", "no"):
        return word.lower() in ("true", "yes")
    return word


def _refused(model: type[TrainConfig], space: Space, given: Mapping[str, object]) -> list[Problem]:
    """Return what the settings say against the ends of ranges and against choices, each by itself."""
    first = {name: dimension.ends[0] for name, dimension in space.items()}
    problems: dict[str, Problem] = {}
    for name, dimension in space.items():
        for value in dimension.ends:
            try:
                settings_of_call(model, {**given, **first, name: value}, "sweep")
            except CallInvalid as error:
                problems |= {str(each): each for each in error.problems}
    return list(problems.values())
