"""The study of a sweep, kept by optuna in one file of the sweep's folder: which values next, and who is to end early.

Only this module imports optuna. Several processes may use the file at once: each trial reports its own scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import Conflict, NotInstalled
from paceline.lab.sweep.pruning import Report
from paceline.lab.sweep.space import Choices, Space, Value

if TYPE_CHECKING:
    import optuna

FILE, NAME = "study.log", "sweep"
PrunerName = Literal["median", "hyperband", "none"]
SamplerName = Literal["tpe", "random", "grid"]
Status = Literal["running", "finished", "pruned", "failed"]
WARM_TRIALS = 4
"""Trials that are never ended early, as there is too little to compare them with."""


@dataclass(frozen=True)
class StudyTrial:
    """A trial as the study knows it."""

    number: int
    params: Mapping[str, Value]
    status: Status
    score: float | None
    scores: Mapping[int, float]
    """By the number of the validation."""


class Study:
    """A search under way. Its file may be opened again: finished trials stay, others go on."""

    def __init__(
        self,
        folder: Path,
        space: Space,
        *,
        mode: Literal["min", "max"],
        pruner: PrunerName = "median",
        sampler: SamplerName = "tpe",
        seed: int = 0,
    ) -> None:
        optuna = _optuna()
        ranges = [name for name, dimension in space.items() if not isinstance(dimension, Choices)]
        if sampler == "grid" and ranges:
            raise Conflict(
                f"`sampler` grid tries all values, and {ranges[0]} is a range",
                hint=f"name its values, as `--search {ranges[0]}=A,B,C`, or take another `--sampler`",
            )
        self._space, self._sampler, self._seed = space, sampler, seed
        self._distributions = {name: _distribution(optuna, dimension) for name, dimension in space.items()}
        self._study = optuna.create_study(
            study_name=NAME,
            storage=_storage(optuna, folder),
            direction="minimize" if mode == "min" else "maximize",
            pruner=_pruner(optuna, pruner),
            load_if_exists=True,
        )

    def ask(self) -> StudyTrial:
        """Return a new trial. What it tries depends on the trials that are finished and on its number alone."""
        number = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = self._make_sampler(number)
        if self._sampler == "grid":
            self._study.enqueue_trial(grid_point(self._space, number))
        trial = self._study.ask(dict(self._distributions))
        return StudyTrial(trial.number, dict(trial.params), "running", None, {})

    def tell(self, number: int, status: Status, score: float | None) -> None:
        """Record how a trial ended."""
        state = _optuna().trial.TrialState
        if status == "finished" and score is not None:
            self._study.tell(number, score, skip_if_finished=True)
        else:
            ended = state.PRUNED if status == "pruned" else state.FAIL
            self._study.tell(number, state=ended, skip_if_finished=True)

    def trials(self) -> list[StudyTrial]:
        state = _optuna().trial.TrialState
        words: dict[Any, Status] = {state.COMPLETE: "finished", state.PRUNED: "pruned", state.FAIL: "failed"}
        return [
            StudyTrial(
                each.number,
                dict(each.params),
                words.get(each.state, "running"),
                each.value if each.state == state.COMPLETE else None,
                dict(each.intermediate_values),
            )
            for each in self._study.get_trials(deepcopy=False)
        ]

    def report_of(self, number: int) -> Report:
        """Return the function by which a trial reports its scores."""
        return _report(self._study, number)

    def _make_sampler(self, number: int) -> Any:
        samplers = _optuna().samplers
        # A sampler of its own for each trial: a sweep that was interrupted then goes on as if it had not been.
        kind = samplers.TPESampler if self._sampler == "tpe" else samplers.RandomSampler
        return kind(seed=(self._seed * 1_000_003 + number) % 2**32)


def grid_point(space: Space, number: int) -> dict[str, Value]:
    """Return one of all combinations of choices; the last setting changes fastest."""
    point: dict[str, Value] = {}
    for name in reversed(list(space)):
        number, place = divmod(number, len(space[name].ends))
        point[name] = space[name].ends[place]
    return {name: point[name] for name in space}


def report_to(folder: Path, number: int, pruner: PrunerName) -> Report:
    """Return the function by which a trial in a process of its own reports its scores."""
    optuna = _optuna()
    study = optuna.load_study(study_name=NAME, storage=_storage(optuna, folder), pruner=_pruner(optuna, pruner))
    return _report(study, number)


def _report(study: optuna.Study, number: int) -> Report:
    optuna = _optuna()
    by_number = {each.number: each._trial_id for each in study.get_trials(deepcopy=False)}

    def report(score: float, validation: int) -> bool:
        trial = optuna.trial.Trial(study, by_number[number])
        trial.report(score, validation)
        return bool(trial.should_prune())

    return report


def require_optuna() -> None:
    """Raise `NotInstalled` where optuna is missing."""
    _optuna()


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise NotInstalled(
            "a sweep needs the package optuna, which is not installed", hint="pip install 'paceline[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _storage(optuna: Any, folder: Path) -> Any:
    from optuna.storages.journal import JournalFileBackend

    return optuna.storages.JournalStorage(JournalFileBackend(str(folder / FILE)))


def _distribution(optuna: Any, dimension: Any) -> Any:
    kinds = optuna.distributions
    if isinstance(dimension, Choices):
        return kinds.CategoricalDistribution(dimension.values)
    if dimension.is_whole:
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


def _pruner(optuna: Any, name: PrunerName) -> Any:
    pruners = optuna.pruners
    if name == "median":
        return pruners.MedianPruner(n_startup_trials=WARM_TRIALS, n_warmup_steps=0)
    return pruners.HyperbandPruner() if name == "hyperband" else pruners.NopPruner()
