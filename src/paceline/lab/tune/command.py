"""`paceline tune TASK ...`: the words of `paceline train`, to measure instead which settings are fastest here.

`paceline tune TASK --lr` is the learning-rate range test (see lab/tune/range_test.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from paceline.config.command_line import dashed, read_words
from paceline.config.load import load
from paceline.config.mode import ModeCommand
from paceline.config.settings import PositiveFloat, Section, TrainConfig
from paceline.config.train_command import POSITIONAL, take_task, task_settings
from paceline.config.yaml_file import read_file
from paceline.core.terminal import tell, warn
from paceline.lab.trial_options import NO_BENCHMARK, refuse_launcher, with_settings
from paceline.world.discover.environment import discover

PROG = "paceline tune"
EXIT_INTERRUPT = 130  # as in world/failure/board.py, which needs torch
OF_SEARCH = ("budget", "knobs", "keep_numerics", "write")
OF_RANGE_TEST = ("lr_from", "lr_to", "lr_steps", "csv")
UNKEPT = (
    *("out", "exp_name", "resume", "loggers", "profile", "profile_ranks", "profile_memory", "monitor", "patience"),
    *("save_every_steps", "save_every_epochs", "val_every_steps", "val_every_epochs"),
)
"""Settings of `paceline train` about what is kept and looked at, of which a trial has nothing."""
KnobName = Literal["level", "compile", "grains", "workers", "order", "threads"]


class TuneCommand(ModeCommand):
    """Which task, on how many ranks of this machine, and what to look for."""

    task: str
    """A recipe's name, or `path/to/file.py:ClassName`."""
    procs: Annotated[int, Field(gt=0)] | Literal["auto"] = 1
    """Ranks of each trial, on this machine; `auto` is one per GPU, one without."""
    budget: PositiveFloat = 120.0
    """Seconds that all trials together may take."""
    knobs: tuple[KnobName, ...] = get_args(KnobName)
    """What may be changed; all else stays as given."""
    keep_numerics: bool = False
    """Only settings that leave results as they are: workers and threads."""
    write: Path = Path("tuned.yaml")
    """File for the settings that are found, for `paceline train --config`."""
    range_test: bool = False
    """Find a learning rate instead, by a sweep; `--lr` without a number says the same."""
    lr_from: PositiveFloat = 1e-6
    """Learning rate at which the sweep begins."""
    lr_to: PositiveFloat = 10.0
    """Where it ends, if the loss does not diverge before."""
    lr_steps: Annotated[int, Field(ge=20)] = 200
    """Steps of the sweep."""
    csv: Path | None = None
    """File for the rates and losses of the sweep."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.lr_from >= self.lr_to:
            yield "`lr_from` must be below `lr_to`: the rate rises"
        for name in sorted(self.model_fields_set & set(OF_SEARCH if self.range_test else OF_RANGE_TEST)):
            if self.range_test:
                yield f"`{name}` has no meaning in the range test: leave it or the bare `--lr` out"
            else:
                yield f"`{name}` belongs to the range test: add `--lr` without a number"
        if not self.is_for_training:
            yield "`mode` must be train or train_eval: nothing else can be tuned"
        if getattr(self, "benchmark", False):
            yield NO_BENCHMARK


def tune_options(settings: type[TrainConfig]) -> type[TuneCommand]:
    about = "Measure which settings train a task fastest on this machine, or find a learning rate."
    return with_settings(TuneCommand, settings, about)


OPTIONS = tune_options(TrainConfig)


def run(argv: Sequence[str]) -> int:
    try:
        return _run(argv)
    except KeyboardInterrupt:
        warn("interrupted before anything was measured\n")
        return EXIT_INTERRUPT


def _run(argv: Sequence[str]) -> int:
    words = range_test_words(argv)
    name, rest = take_task(words, OPTIONS)
    if name is None:
        # Shows help, or says what is missing.
        load(OPTIONS, with_length(OPTIONS, words)[0], prog=PROG, positional=POSITIONAL)
    assert name is not None
    world = discover(os.environ)
    from paceline.train.find_task import find_task  # from here on torch is needed

    task_type = find_task(name)
    model = tune_options(task_type.Settings)
    rest, is_length_ours = with_length(model, rest)
    options = load(model, [name, *rest], prog=PROG, positional=POSITIONAL)
    settings = task_settings(options, task_type.Settings)
    idle = without_effect(settings)
    if idle and world.rank == 0 and world.launcher != "procs":  # whose launcher has said so
        tell(f"without effect here, as nothing is kept: {', '.join(idle)}\n")
    if options.range_test:
        from paceline.lab.tune.range_command import range_test

        return range_test(world, task_type, options, settings, [name, *rest])
    refuse_launcher(world, "tune", "` without a launcher; ranks on other machines cannot be tuned yet")
    from paceline.lab.tune.contest import tune

    return tune(options, settings, is_length_ours=is_length_ours)


def range_test_words(argv: Sequence[str]) -> list[str]:
    """`--lr` without a number asks for the range test."""
    words = list(argv)
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == "--lr" and not re.match(r"[+-]?\.?\d", following):
            words[place] = "--range-test"
    return words


def with_length(model: type[Section], words: list[str]) -> tuple[list[str], bool]:
    """Return the words, with `--epochs 1` added if no length is set, and True if it was added.

    How long to train has no meaning here.
    """
    typed = read_words(model, words)
    names = set(typed.given)
    for file in typed.files:
        names |= set(read_file(model, file)[0])
    has_own = any(model.model_fields[name].default is not None for name in ("epochs", "steps"))
    is_missing = not has_own and not names & {"epochs", "steps"}
    # In front, so that no option that lacks its value is told of a word that nobody typed.
    return (["--epochs", "1", *words] if is_missing else words), is_missing


def without_effect(settings: TrainConfig) -> list[str]:
    """Settings that were given and do nothing here, as they are typed."""
    fields = type(settings).model_fields
    names = [name for name in UNKEPT if name in settings.model_fields_set]
    return [dashed(name) for name in names if getattr(settings, name) != fields[name].get_default()]
