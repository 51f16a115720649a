"""Settings given by name in a call from Python, with the same answers to mistakes as files and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from paceline.config import messages as wording
from paceline.config.aliases import aliases_of
from paceline.config.parse import Given
from paceline.config.problems import NOWHERE, Problem, SettingsInvalid, nearest
from paceline.config.settings import FOR_USE, Section
from paceline.core.errors import WrongType

S = TypeVar("S", bound=Section)


class CallInvalid(SettingsInvalid, ValueError):
    """Settings in a call from Python that cannot work, with every reason."""

    @property
    def advice(self) -> str:
        only = self.problems[0].hint if len(self.problems) == 1 else ""
        return only or "docs/options.md lists all settings"


def kind_of(value: object) -> str:
    """Return what a value is, for a message: `None`, `the class Small`, `a Linear`, `'digits'`."""
    if value is None or isinstance(value, str):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"of the type {type(value).__name__}"


def settings_or_config(
    model: type[S],
    config: S | None,
    values: Mapping[str, Any],
    call: str,
    *,
    more: tuple[str, ...] = (),
    is_for_training: bool = True,
) -> S:
    """Return `config`, or the settings that a call names where it has none; refuse both at once."""
    if config is None:
        return settings_of_call(model, values, call, more=("config", *more), is_for_training=is_for_training)
    if not isinstance(config, model):
        raise WrongType(
            f"`config` of {call} is {kind_of(config)}, not {model.__name__}",
            hint="give the settings by name, `epochs=3, lr=0.1` (of a dictionary: `**settings`), or make a "
            f"{model.__name__} of them",
        )
    if values:
        listed = ", ".join(f"`{name}`" for name in values)
        raise WrongType(
            f"{call} was given `config` and also {listed}, which would have no effect",
            hint="put them into `config`, or leave it out",
        )
    return config


def settings_of_call(
    model: type[S],
    values: Mapping[str, Any],
    call: str,
    *,
    more: tuple[str, ...] = (),
    is_for_training: bool = True,
) -> S:
    """Return the settings that a call names, or raise `CallInvalid` with all mistakes at once.

    `call` is the function's name, `more` are its other arguments, for nearest names. Settings that are not
    `is_for_training` may lack what only training needs.
    """
    aliases = aliases_of(model)
    named = {aliases.get(name, name): value for name, value in values.items()}
    problems = [_unknown(name, value, model, more) for name, value in named.items() if name not in model.model_fields]
    known = {name: value for name, value in named.items() if name in model.model_fields}
    given = {
        name: Given(value, name, repr(value), (NOWHERE, place)) for place, (name, value) in enumerate(known.items())
    }
    context = {} if is_for_training else {FOR_USE: True}
    try:
        settings = model.model_validate(known, context=context)
        if not problems:
            return settings
    except ValidationError as error:
        problems += _problems(error, model, given, {problem.meant for problem in problems}, context)
    raise CallInvalid(problems, call)


def _problems(
    error: ValidationError, model: type[S], given: dict[str, Given], tried: set[str], context: dict[str, Any]
) -> list[Problem]:
    by_field = wording.problems(error, model, given)
    wrong = {*by_field, *tried}
    problems = list(by_field.values())
    try:
        model.model_validate({name: entry.raw for name, entry in given.items() if name not in wrong}, context=context)
    except ValidationError as rest:
        problems += wording.across(rest, model, given, wrong)
    return [_in_python(problem) for problem in problems]


def _in_python(problem: Problem) -> Problem:
    """Return a problem with names as Python has them: `--global-batch` is `global_batch`."""
    return Problem(
        _undashed(problem.where),
        _undashed(problem.what),
        _undashed(problem.hint),
        problem.given,
        problem.place,
        problem.is_unknown,
        problem.is_missing,
        problem.meant,
    )


def _undashed(text: str) -> str:
    words = [word.removeprefix("--").replace("-", "_") if word.startswith("--") else word for word in text.split(" ")]
    return " ".join(words)


def _unknown(name: str, value: Any, model: type[S], more: tuple[str, ...]) -> Problem:
    meant = nearest(name, [*model.model_fields, *more])
    hint = f"did you mean {meant}?" if meant else ""
    return Problem(name, "there is no such setting", hint, repr(value), is_unknown=True, meant=meant or "")
