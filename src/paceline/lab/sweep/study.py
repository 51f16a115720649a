"""Study of a sweep, kept by optuna in one file of the sweep's folder: which values next, and which trials end early.

Only this module imports optuna. Several processes may use the file at once: each trial reports its own scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import NotInstalled
from paceline.lab.sweep.outcome import Status, SweepTrial
from paceline.lab.sweep.plan import Plan, PrunerName, run_folder
from paceline.lab.sweep.space import Choices, Dimension

if TYPE_CHECKING:
    import optuna

FILE, NAME, END = "study.log", "sweep", "end"
WARM_TRIALS = 4
"""Trials that are never ended early, as there is too little to compare them with."""
Report = Callable[[float, int], bool]
"""Takes the score of a validation and its number; returns True if the trial should end."""


@dataclass(frozen=True)
class TrialEnd:
    """End of a trial's run, as its process adds it to the study."""

    status: Literal["finished", "pruned", "failed", "stopped"]
    score: float | None = None
    num_steps: int = 0
    seconds: float = 0.0
    why: str = ""
    """Reason of a failure."""


class Study:
    """Search under way. Its file may be opened again: finished trials stay, the other ones continue."""

    def __init__(self, folder: Path, pruner: PrunerName, mode: Literal["min", "max"] = "min") -> None:
        """`mode` counts where the file does not exist yet."""
        package = require_optuna()
        pruners = package.pruners
        if pruner == "median":
            chosen = pruners.MedianPruner(n_startup_trials=WARM_TRIALS, n_warmup_steps=0)
        else:
            chosen = pruners.HyperbandPruner() if pruner == "hyperband" else pruners.NopPruner()
        journal = package.storages.journal.JournalFileBackend(str(folder / FILE))
        self._folder = folder
        self.optuna: optuna.Study = package.create_study(
            study_name=NAME,
            storage=package.storages.JournalStorage(journal),
            direction="minimize" if mode == "min" else "maximize",
            pruner=chosen,
            load_if_exists=True,
        )

    def ask(self, plan: Plan) -> SweepTrial:
        """Return a new trial. What it tries depends on the trials that are finished and on its number alone."""
        optuna, number = require_optuna(), len(self.optuna.get_trials(deepcopy=False))
        if plan.sampler == "grid":
            points = product(*(dimension.ends for dimension in plan.space.values()))
            self.optuna.enqueue_trial(dict(zip(plan.space, next(islice(points, number, None)), strict=True)))
        # A sampler of its own for each trial: an interrupted sweep then continues as if it had not been interrupted.
        kind = optuna.samplers.TPESampler if plan.sampler == "tpe" else optuna.samplers.RandomSampler
        self.optuna.sampler = kind(seed=(plan.seed * 1_000_003 + number) % 2**32)
        self.optuna.ask({name: _distribution(optuna, each) for name, each in plan.space.items()})
        return self.trials()[number]

    def trials(self) -> tuple[SweepTrial, ...]:
        return tuple(self._trial(each) for each in self.optuna.get_trials(deepcopy=False))

    def _trial(self, trial: optuna.trial.FrozenTrial) -> SweepTrial:
        words: dict[str, Status] = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
        scores, end = dict(trial.intermediate_values), TrialEnd(**(trial.user_attrs.get(END) or {"status": "stopped"}))
        status = words.get(trial.state.name, "running")
        score = trial.value if status == "finished" else scores[max(scores)] if scores else None
        folder = run_folder(self._folder, trial.number)
        return SweepTrial(
            trial.number, dict(trial.params), status, score, folder, end.num_steps, end.seconds, end.why, scores
        )

    def note(self, number: int, end: TrialEnd | None) -> None:
        """Keep how the run of a trial ended; None if it runs again."""
        self._handle(number).set_user_attr(END, None if end is None else asdict(end))

    def noted(self, number: int) -> TrialEnd | None:
        """Return how the run of a trial ended; None if its process was killed or has not ended."""
        values = self.optuna.get_trials(deepcopy=False)[number].user_attrs.get(END)
        return None if values is None else TrialEnd(**values)

    def close(self, number: int, end: TrialEnd) -> None:
        """End a trial."""
        self.note(number, end)
        states = require_optuna().trial.TrialState
        if end.status == "finished":
            self.optuna.tell(number, end.score)
        else:
            self.optuna.tell(number, state=states.PRUNED if end.status == "pruned" else states.FAIL)

    def report_of(self, number: int) -> Report:
        """Return the function by which a trial reports its scores."""
        trial = self._handle(number)

        def report(score: float, validation: int) -> bool:
            trial.report(score, validation)
            return bool(trial.should_prune())

        return report

    def _handle(self, number: int) -> optuna.trial.Trial:
        trial_id = self.optuna.get_trials(deepcopy=False)[number]._trial_id
        handle: optuna.trial.Trial = require_optuna().trial.Trial(self.optuna, trial_id)
        return handle


def require_optuna() -> Any:
    """Return the package; raise `NotInstalled` where it is missing."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise NotInstalled(
            "a sweep needs the package optuna, which is not installed", hint="pip install 'paceline[sweep]'"
        ) from None
    import optuna.storages.journal

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if isinstance(dimension, Choices):
        return kinds.CategoricalDistribution(dimension.values)
    if dimension.is_whole:
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)
