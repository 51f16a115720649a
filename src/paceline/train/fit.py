"""`paceline.fit`: a task and its settings, in one call, on however many ranks this process is one of."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, overload

import torch
from typing_extensions import ParamSpec

from paceline.config.mode import Mode, Purpose, purpose_of, validating
from paceline.config.python_call import kind_of, settings_or_config
from paceline.config.run_path import run_folder
from paceline.config.settings import TrainConfig
from paceline.core.cloud.file_copy import exists, send
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import Conflict, InvalidSetting, PacelineError
from paceline.core.run_folder import RunFolder
from paceline.core.terminal import tell
from paceline.core.user_file import refuse_on_import, spec_of
from paceline.observe.callback import Callback, checked
from paceline.train import apply
from paceline.train import predictions as outcome
from paceline.train.benchmark import benchmark
from paceline.train.checkpoint import reader
from paceline.train.loop import train
from paceline.train.result import Result
from paceline.train.rounds import train_in_rounds
from paceline.train.run import Run, open_run
from paceline.train.splitting import SplitNeedsOneRank, train_splitting
from paceline.train.survival import Survival
from paceline.train.task import Task
from paceline.world.link import Link
from paceline.world.rounds import Rounds
from paceline.world.start import from_settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.config.arguments import TrainArguments

PREDICTIONS = "predictions.jsonl"
"""File in the run folder with the last predictions of `--mode infer`."""


P = ParamSpec("P")


class HasSettings(Protocol[P]):
    """A task whose class names its settings: `Settings = MySettings`."""

    @property
    def Settings(self) -> Callable[P, TrainConfig]: ...


@overload
def fit(
    task: Task,
    config: TrainConfig,
    *,
    mode: Mode | None = ...,
    watchers: Sequence[Callback] = ...,
    procs: int | Literal["auto"] = ...,
) -> Result: ...
@overload
def fit(
    task: Task,
    *,
    mode: Mode | None = ...,
    watchers: Sequence[Callback] = ...,
    procs: int | Literal["auto"] = ...,
    **settings: Unpack[TrainArguments],
) -> Result: ...
@overload
def fit(task: HasSettings[P], *args: P.args, **settings: P.kwargs) -> Result: ...
@overload
def fit(task: Task, *, mode: Mode, **settings: Any) -> Result: ...
def fit(  # type: ignore[misc]  # `args` of the last one are none: settings have names
    task: Task,
    config: TrainConfig | None = None,
    *,
    mode: Mode | None = None,
    watchers: Sequence[Callback] = (),
    procs: int | Literal["auto"] = 1,
    **settings: Any,
) -> Result:
    """Train `task` with `config`, or with the settings given by name; or measure its speed, if `benchmark` is set.

    `mode` is `train` (without validation), `train_eval` (with it), `eval` (only validate a run) or `infer` (only
    predict); if not set, it is training with what the setting `validation` says.

    `watchers` follow the run on the first rank, beside those that the settings and the task name.
    Under a launcher (torchrun, mpirun, srun, `paceline train --procs`) every rank calls it alike.

    `procs` starts so many ranks on this machine (`auto`: one per GPU), each with a copy of the task, and returns when
    they have ended: from a notebook or a script, without a launcher. The task may be defined in the notebook; it and
    its data are pickled by value (`pip install 'paceline[notebook]'`), so the task here stays as it was. Attributes of
    `watchers` come back.
    """
    refuse_on_import("paceline.fit")
    if not isinstance(task, Task):
        raise NotATask(task)
    watchers = checked(watchers)
    task.spec = task.spec or spec_of(type(task))
    mode = _checked_mode(mode)
    more, is_for_training = ("task", "mode", "watchers", "procs"), purpose_of(mode) == "train"
    config = settings_or_config(
        task.Settings, config, settings, "paceline.fit", more=more, is_for_training=is_for_training
    )
    config = validating(config, mode)
    if procs != 1:
        from paceline.train.fit_procs import fit_on_procs

        started = fit_on_procs(task, config, mode, watchers, procs)
        if started is not None:
            return started
    with _only_thread(), _as_settings_say(), from_settings(config) as link:
        if config.out is None and config.exp_name is not None:
            # One rank looks which names are taken.
            chosen = run_folder(config, task="", moment="", exists=exists) if link.is_first else None
            config = config.model_copy(update={"out": link.broadcast_object(chosen)})
        return run_mode(task, config, link, watchers, purpose_of(mode))


def _checked_mode(mode: Mode | None) -> Mode | None:
    if mode is not None and mode not in get_args(Mode):
        raise InvalidSetting(f"`mode` is {mode!r}", hint=f"choose one of {', '.join(get_args(Mode))}")
    return mode


class NotATask(PacelineError, TypeError):
    """Something else where a task belongs."""

    value: Any
    call: str = "paceline.fit"
    sentence = "`task` of {call} is {what}, not a task"
    hint = "{advice}"

    @property
    def what(self) -> str:
        return kind_of(self.value)

    @property
    def advice(self) -> str:
        if isinstance(self.value, type) and issubclass(self.value, Task):
            return f"make one: `{self.value.__name__}()`"
        if isinstance(self.value, str):
            return f"a task by its name is for `paceline train {self.value}`; here give an object of its class"
        return "subclass `paceline.Task` and give it the model, the data and the loss: docs/task.md"


_inside: list[tuple[int, int]] = []
"""Process and thread of each `fit` that has not returned."""


@contextmanager
def _only_thread() -> Iterator[None]:
    """Refuse a second thread; one call inside of another, in a hook, is fine."""
    place = os.getpid(), threading.get_ident()
    if any(pid == place[0] and thread != place[1] for pid, thread in list(_inside)):
        raise Conflict(
            "another thread of this process is inside paceline.fit, and both would share one state of random numbers",
            hint="call it in one thread after the other, or in separate processes",
        )
    _inside.append(place)
    try:
        yield
    finally:
        _inside.remove(place)


@contextmanager
def _as_settings_say() -> Iterator[None]:
    """Leave modes of the caller outside: `no_grad` (a run inside of another's validation), autocast."""
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as modes:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        yield


def fit_surviving(
    make_task: Callable[[], Task], config: TrainConfig, rounds: Rounds, code: Mapping[str, str]
) -> Result:
    """Train in rounds: where a rank is lost the others go on, with a task that is made anew.

    `code` are digests of the task's files, by which a process that joins is compared with those that are there.
    """

    def open_round(config: TrainConfig, link: Link, survival: Survival) -> Run:
        if config.split_on_oom:
            raise SplitNeedsOneRank(link.world.size)
        return open_run(make_task(), config, link, survival=survival)

    return train_in_rounds(config, rounds, open_round, code)


def run_mode(
    task: Task, config: TrainConfig, link: Link, watchers: Sequence[Callback] = (), purpose: Purpose = "train"
) -> Result:
    """Train, measure, validate or predict on the ranks of a link."""
    if config.benchmark:
        return benchmark(task, config, link)
    if purpose != "train":
        return _apply(task, config, link, purpose)
    if config.split_on_oom:
        return train_splitting(task, config, link, watchers)
    run = open_run(task, config, link, watchers)
    result = train(run)
    return replace(result, model=run.give_model())


def _apply(task: Task, config: TrainConfig, link: Link, purpose: Purpose) -> Result:
    """Restore the newest checkpoint of `out`, or the one that `resume` names, and use it; the run stays as it is."""
    folder, which = _run_to_use(config, purpose)
    apply.bring(link, folder)
    checkpoint = apply.choose_checkpoint(link, folder, which)
    step = reader.load(checkpoint, [], verify=False).step
    if purpose == "eval":
        metrics = apply.evaluate_run(task, config, link, folder, checkpoint)
        if link.is_first:
            tell(f"{checkpoint}\n{outcome.table(metrics)}")
        return Result("evaluated", step, math.nan, metrics, mode="eval", folder=folder, checkpoint=checkpoint)
    pairs = apply.predict_run(task, config, link, folder, checkpoint)
    file = folder / PREDICTIONS
    written = outcome.write_predictions(pairs, link, outcome.json_line, file)
    if link.is_first:
        send(file)
        tell(f"{checkpoint}\n{written} predictions in {file}\n")
    return Result("predicted", step, math.nan, mode="infer", predictions=file, folder=folder, checkpoint=checkpoint)


def _run_to_use(config: TrainConfig, purpose: Purpose) -> tuple[Path, apply.Which]:
    which: apply.Which = config.resume if isinstance(config.resume, Path) else "last"
    folder = config.out
    if isinstance(which, Path) and (folder is None or not RunFolder(folder).is_run):
        bring_run(which.parent.parent)
        folder = which.resolve().parent.parent
    if folder is None:
        error = apply.NoRun(f"`mode` is {purpose!r}, but not said of which run")
        error.hint = "add `--out FOLDER`, the run's folder, or `--resume CHECKPOINT`"
        raise error
    return folder, which
