"""The edge of `paceline tune`: starts trials, shows how far it is, prints the table and writes the file."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from paceline.config.python_call import CallInvalid
from paceline.config.settings import TrainConfig
from paceline.core.disk import CannotWrite
from paceline.core.errors import AlreadyExists, Failed
from paceline.core.terminal import tell
from paceline.lab.tune import knobs as tune_space
from paceline.lab.tune import report as tune_report
from paceline.lab.tune.command import TuneCommand
from paceline.lab.tune.folder import AskedToLeave, leaving_when_asked, work_folder
from paceline.lab.tune.process import Spec, run_trial
from paceline.lab.tune.race import run_race
from paceline.lab.tune.search import (
    Changes,
    Failure,
    Race,
    SearchResult,
    Speed,
    Trial,
    budget_for,
    make_fit,
    ratios_of,
    search,
)
from paceline.observe.bars import SideBar
from paceline.speed.autotune.proof import is_decided
from paceline.world.failure.board import EXIT_INTERRUPT
from paceline.world.launch.launcher import count_procs

TRIALS_IN_BUDGET = 40
"""A trial is timed for this part of the budget, within limits; starting and warming up comes on top."""
LEAST_MEASURE_S, MOST_MEASURE_S = 1.0, 10.0
ROOM = 0.7
"""Share of the memory that two trials side by side may take."""
PROBE = 1 << 16
"""Bytes for which a disk must have room."""
OTHER_NAME = "choose another name (`--write FILE`, `--csv FILE`)"
COMMAND = (sys.executable, "-m", "paceline.lab.tune.trial_process")


def tune(options: TuneCommand, settings: TrainConfig, *, is_length_ours: bool) -> int:
    """Search, and say what was found."""
    check_target(options.write)
    procs = count_procs(options.procs, settings.device, torch.cuda.device_count())
    with leaving_when_asked(), work_folder() as folder:
        tuner = _Tuner(options, settings, procs, folder)
        try:
            result = tuner.search()
        except KeyboardInterrupt as stopped:
            _print(tuner.so_far())
            return 128 + stopped.number if isinstance(stopped, AskedToLeave) else EXIT_INTERRUPT
    lines = report(result, tuner.left_out, tuner.enough_s)
    _print(lines)
    values = settings.model_dump(mode="json", exclude_unset=True)
    if is_length_ours:
        del values["epochs"]
    if procs > 1:
        values["procs"] = procs
    write_text(options.write, tune_report.file_text(options.task, values, result, lines))
    length = " --epochs N" if is_length_ours else ""
    _print([f"{options.write} is written: `paceline train {options.task} --config {options.write}{length}`"])
    return 0


def report(result: SearchResult, left_out: list[str], enough_s: float) -> list[str]:
    """The table, who won, and what that means."""
    lines = tune_report.table(result)
    lines += [f"not tried: {reason}" for reason in left_out]
    if result.untried:
        lines.append(
            f"not tried: {', '.join(result.untried)}: no time left; `--budget {enough_s:.0f}` has it, more or less"
        )
    lines += tune_report.unproven(result)
    lines.append(tune_report.sentence(result))
    changed = tune_report.numerics(result.winner)
    if changed:
        lines.append(
            f"results change with {changed}: train anew with it, and look at the losses (`--keep-numerics` avoids it)"
        )
    return lines


def check_target(path: Path) -> None:
    """Before anything is measured: may the file be written?"""
    check_folder(path)
    if path.exists() and not path.is_file():
        raise CannotWrite(path, OSError(None, "it is no file"), OTHER_NAME)
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(tune_report.HEAD):
        raise AlreadyExists(
            f"{path} exists and was not written by `paceline tune`",
            hint="choose another with `--write FILE`, or take this one away",
        )


def check_folder(path: Path) -> None:
    """Check that a file can be written, by doing so: a disk may be full, or for reading only."""
    if path.is_dir():
        raise CannotWrite(path, OSError(None, "it is a folder"), OTHER_NAME)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise CannotWrite(path, OSError(None, "there is no such folder"), OTHER_NAME)
    try:
        if path.exists():
            path.open("ab").close()
        else:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"." * PROBE)
                probe.flush()
    except OSError as error:
        raise CannotWrite(path, error, OTHER_NAME) from None


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(path, error, OTHER_NAME) from None


def _cannot_be_measured(failure: Failure, budget_s: float) -> Failed:
    """Return the error for settings as given that cannot be measured: there is nothing to compare with."""
    hint = ""
    if failure.kind == "time":
        hint = f"set a larger `--budget`, such as {4 * budget_s:.0f}"
    elif failure.is_memory:
        hint = "a smaller `--global-batch`, or recompute with `--checkpoint-activations`"
    gap = "\n" if "\n" in failure.what else " "
    return Failed(f"the settings as given cannot be measured:{gap}{failure.what}", hint=hint)


class _Tuner:
    """A search under way."""

    def __init__(self, options: TuneCommand, settings: TrainConfig, procs: int, folder: Path) -> None:
        self._options, self._settings, self._procs, self._folder = options, settings, procs, folder
        self._given = settings.model_dump(mode="json", exclude_unset=True)
        self._measure_s = min(MOST_MEASURE_S, max(LEAST_MEASURE_S, options.budget / TRIALS_IN_BUDGET))
        self._began = time.monotonic()
        self._facts: tune_space.Facts | None = None
        self._num_races = 0
        self._hopeless: dict[str, Failure] = {}
        """Trials that ran out of memory, by label: they will not fit the next time either."""
        self.trials: list[Trial] = []
        self.races: list[Race] = []
        self.left_out: list[str] = []
        self.enough_s = options.budget
        """A budget in which all knobs have their turn, about."""

    def search(self) -> SearchResult:
        default = self.measure({}, self._left_s())
        tried = [default]
        if isinstance(default.outcome, Failure):
            fitting, tried = self._make_fit(default)
            if fitting is None:
                last = tried[-1].outcome
                raise _cannot_be_measured(last if isinstance(last, Failure) else default.outcome, self._options.budget)
            default = fitting
        assert self._facts is not None
        assert isinstance(default.outcome, Speed)
        config = self._config(default.changes)
        assert isinstance(config, TrainConfig)
        facts = dataclasses.replace(self._facts, grains=default.changes.get("grains", self._facts.grains))
        knobs, self.left_out = tune_space.knobs(
            facts, default.outcome, config, self._options.knobs, keep_numerics=self._options.keep_numerics
        )
        result = search(default, knobs, self.measure, self._left_s, self.race)
        untried = [knob for knob in knobs if knob.name in result.untried]
        trial_s = statistics.median(trial.wall_s for trial in result.trials)
        self.enough_s = budget_for(max(self._spent_s(), self._options.budget), trial_s, untried)
        earlier = tuple(tried[:-1]) if default.changes else ()
        return dataclasses.replace(result, trials=(*earlier, *result.trials))

    def so_far(self) -> list[str]:
        """Return the report of a search that is interrupted: all that it has measured."""
        came = f"after {self._spent_s():.0f} of {self._options.budget:.0f} s"
        if not self.trials:
            return [f"interrupted {came}: nothing was measured, nothing is written"]
        nobody = {"": ""}
        result = SearchResult(tuple(self.trials), {}, nobody, races=tuple(self.races))
        proven = tune_report.proven(result)
        return [*tune_report.table(result), *proven, f"interrupted {came}: nothing is written"]

    def measure(self, changes: Changes, limit_s: float) -> Trial:
        """One trial, in processes of its own."""
        name, began = tune_report.label(changes), time.monotonic()
        config = self._config(changes)
        outcome: Speed | Failure
        if isinstance(config, str):
            outcome = Failure("refused", config)
        elif name in self._hopeless:
            return Trial(changes, self._hopeless[name], 0.0)
        else:
            spec = self._spec(config)
            with SideBar(f"trying {name}", round(self._options.budget)) as bar:
                outcome, facts = run_trial(
                    COMMAND,
                    self._folder / str(len(self.trials)),
                    spec,
                    limit_s,
                    lambda: bar.show(round(self._spent_s())),
                )
            # The first says how the settings as given are; what others have is their own.
            self._facts = self._facts or facts
        if isinstance(outcome, Failure) and outcome.is_memory:
            self._hopeless[name] = outcome
        trial = Trial(changes, outcome, time.monotonic() - began)
        self.trials.append(trial)
        self._tell(name, trial)
        return trial

    def race(self, first: Trial, second: Trial, limit_s: float) -> list[tuple[Trial, Trial]]:
        """Two settings side by side; nothing where memory has no room for both."""
        if not has_room(first, second, self._facts):
            return []
        entries = []
        for trial in (first, second):
            config = self._config(trial.changes)
            assert isinstance(config, TrainConfig)
            self._num_races += 1
            entries.append((self._folder / f"race-{self._num_races}", self._spec(config, is_paced=True)))
        names = [tune_report.label(trial.changes) for trial in (first, second)]
        with SideBar(f"racing {names[0]} and {names[1]}", round(self._options.budget)) as bar:
            rates = run_race(
                COMMAND,
                entries,
                limit_s,
                lambda: bar.show(round(self._spent_s())),
                lambda rounds: is_decided([other / rate for rate, other in rounds]),
            )
        pairs = [(_with_rate(first, rate), _with_rate(second, other)) for rate, other in rates]
        if pairs:
            held = Race(first.changes, second.changes, tuple(ratios_of(pairs)))
            self.races.append(held)
            self._say(f"{names[1]} against {names[0]}: {held.ratio:.2f}x as fast in {len(pairs)} rounds in turns")
        return pairs

    def _make_fit(self, default: Trial) -> tuple[Trial | None, list[Trial]]:
        assert isinstance(default.outcome, Failure)
        if (
            not default.outcome.is_memory
            or self._facts is None
            or "grains" not in self._options.knobs
            or self._options.keep_numerics
        ):
            return None, [default]
        return make_fit(default, tune_space.finer(self._facts, self._settings), self.measure, self._left_s)

    def _config(self, changes: Changes) -> TrainConfig | str:
        """The settings of a trial, or why they do not go together."""
        values: dict[str, Any] = {**self._given, **changes}
        try:
            return type(self._settings)(**values)
        except CallInvalid as error:
            return "; ".join(map(str, error.problems))

    def _spec(self, config: TrainConfig, *, is_paced: bool = False) -> Spec:
        values = config.model_dump(mode="json", exclude_unset=True)
        return Spec(self._options.task, values, self._procs, self._measure_s, is_paced)

    def _spent_s(self) -> float:
        return time.monotonic() - self._began

    def _left_s(self) -> float:
        return self._options.budget - self._spent_s()

    def _tell(self, name: str, trial: Trial) -> None:
        outcome = trial.outcome
        if isinstance(outcome, Speed):
            what = f"{tune_report.number(outcome.samples_per_s)} samples/s"
        else:
            lines = outcome.what.strip().splitlines() or [outcome.kind]
            what = f"{outcome.kind}: {lines[-1 if outcome.kind == 'failed' else 0]}"
        self._say(f"{name}: {what}")

    def _say(self, what: str) -> None:
        if self._settings.progress != "none":
            _print([f"{self._spent_s():5.0f} s  {what}"])


def has_room(first: Trial, second: Trial, facts: tune_space.Facts | None) -> bool:
    """Return True if two trials fit beside each other, with some memory to spare."""
    needs = [trial.outcome.memory_bytes for trial in (first, second) if isinstance(trial.outcome, Speed)]
    return facts is not None and len(needs) == 2 and sum(needs) <= ROOM * facts.memory_bytes


def _with_rate(trial: Trial, samples_per_s: float) -> Trial:
    assert isinstance(trial.outcome, Speed)
    return dataclasses.replace(trial, outcome=dataclasses.replace(trial.outcome, samples_per_s=samples_per_s))


def _print(lines: list[str]) -> None:
    tell("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
