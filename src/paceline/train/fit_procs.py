"""`paceline.fit(..., procs=2)`: ranks in processes of their own, started from a notebook or a script.

The task travels by value (cloudpickle), because processes that are started anew cannot import what was typed into a
notebook; forked ones could not use a GPU that the notebook has touched, nor threads that it has started. Results come
back the same way, so classes that were defined in the notebook are the notebook's own again; so does what watchers have
seen, into the watchers that were handed over.

    python -m paceline.train.fit_procs FOLDER      one rank
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.config.mode import Mode
from paceline.config.settings import TrainConfig
from paceline.core.cloud.address import refuse_memory
from paceline.core.errors import Conflict, InvalidSetting, NotInstalled, PacelineError, first_line
from paceline.core.terminal import warn
from paceline.core.units import counted
from paceline.observe.callback import Callback, RunInfo
from paceline.train.result import Result
from paceline.train.task import Task
from paceline.world.discover.environment import discover
from paceline.world.launch.launcher import count_procs, launch

EXIT_INTERRUPTED = 128 + signal.SIGINT
PAYLOAD, RESULT, ERROR = "task", "result", "error"


class TaskNotPortable(PacelineError):
    """A task, its settings or a watcher that cannot be pickled."""

    why: str
    sentence = "`procs` hands the task to other processes, and this one cannot be pickled: {why}"
    hint = "open files, connections and CUDA tensors in `train_data` or `model`, not in `__init__`"


class RanksFailed(PacelineError):
    """Ranks that ended with an error of the task's, or one that they could not hand over."""

    procs: str
    why: str
    exit_code = 1
    sentence = "paceline.fit(procs={procs}) failed: {why}"
    hint = "the rank that failed first has printed its traceback"


def fit_on_procs(
    task: Task,
    config: TrainConfig,
    mode: Mode | None,
    watchers: Sequence[Callback],
    procs: int | Literal["auto"],
) -> Result | None:
    """Fit on ranks that are started for it; None where this process is a rank, or is the only one there would be."""
    if procs != "auto" and (not isinstance(procs, int) or isinstance(procs, bool) or procs < 1):
        raise InvalidSetting(
            f"`procs` is {procs!r}, not a number of ranks", hint="give 1 or more, or `'auto'` for one per GPU"
        )
    world = discover(os.environ)
    if world.launcher != "plain":
        if procs not in ("auto", world.local_size):
            raise Conflict(
                f"`procs` is {procs}, but {world.launcher} has started {counted(world.local_size, 'rank')} on this "
                "machine already",
                hint="leave out `procs`",
            )
        return None
    number = count_procs(procs, config.device, torch.cuda.device_count())
    if number == 1:
        return None
    if threading.current_thread() is not threading.main_thread():
        raise Conflict(
            "`procs` starts processes, and this is not the main thread, which alone can pass signals on to them",
            hint="call paceline.fit from the main thread",
        )
    refuse_memory(config.out or config.runs_dir)
    with tempfile.TemporaryDirectory(prefix="paceline-fit-") as name:
        folder = Path(name)
        parts = task.detached(), config, mode, tuple(watchers)
        payload = pickle.dumps((list(sys.path), list(sys.argv), _dumped(parts)))
        (folder / PAYLOAD).write_bytes(payload)
        sys.stdout.flush()
        code = launch(number, [sys.executable, "-m", "paceline.train.fit_procs", str(folder)], device=config.device)
        return _outcome(folder, procs, code, watchers)


def _outcome(folder: Path, procs: int | Literal["auto"], code: int, watchers: Sequence[Callback]) -> Result:
    """Return what the ranks have left, and let watchers have seen what their copies saw; raise what failed."""
    if (folder / ERROR).exists():
        error = pickle.loads((folder / ERROR).read_bytes())
        raise error if isinstance(error, PacelineError) else RanksFailed(str(procs), error)
    ended = pickle.loads((folder / RESULT).read_bytes()) if (folder / RESULT).exists() else None
    if ended is None and code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    # Ranks that were asked to stop have saved, as one in this process would have.
    if ended is None or (code != 0 and ended[0].status != "stopped"):
        raise RanksFailed(str(procs), f"its ranks ended with exit code {code}")
    result, states = ended
    assert isinstance(result, Result)
    for watcher, state in zip(watchers, states, strict=True):
        vars(watcher).update({name: pickle.loads(value) for name, value in state.items()})
    return result


def _dumped(value: Any) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise NotInstalled(
            "`procs` hands the task to other processes, and needs the package cloudpickle, which is not installed",
            hint="pip install 'paceline[notebook]', or put the task into a file: "
            "`paceline train file.py:Task --procs N`",
        ) from None
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # whatever an object of the user's raises
        raise TaskNotPortable(f"{type(error).__name__}: {error}") from error


def _dumped_outcome(result: Result, states: list[Any]) -> bytes:
    """Return a result and what watchers have seen as bytes; without a model that cannot be pickled: what was trained is
    not lost with it."""
    try:
        return _dumped((result, states))
    except TaskNotPortable as error:
        place = (
            "no folder was asked for (`out`)" if result.folder is None else f"its checkpoints are in {result.folder}"
        )
        warn(f"the trained model cannot be handed back, `result.model` is None ({error.why}); {place}\n")
        return _dumped((replace(result, model=None), states))


def _dumped_error(error: PacelineError) -> bytes:
    """Return an error as bytes; one that holds what cannot be pickled, by its words."""
    try:
        return _dumped(error)
    except TaskNotPortable:
        return _dumped(PacelineError(str(error), hint=error.hint))


def work(folder: Path) -> int:
    """Fit as one rank; the first writes the result and what its watchers have seen, one that fails its error."""
    from paceline.train.fit import fit
    from paceline.world.failure.together import is_broken_link

    paths, words, blob = pickle.loads((folder / PAYLOAD).read_bytes())
    sys.argv = words  # what the user typed, for the task and for the run's record
    sys.path[:] = [*sys.path, *(path for path in paths if path not in sys.path)]
    task, config, mode, watchers = pickle.loads(blob)
    rank = discover(os.environ).rank
    try:
        result = fit(task, config, mode=mode, watchers=watchers)
    except Exception as error:
        if not is_broken_link(error):  # the first word is of the rank that broke it
            _leave(
                folder / ERROR, _dumped_error(error) if isinstance(error, PacelineError) else _dumped(first_line(error))
            )
        raise
    if rank == 0:
        # The model in pieces means nothing outside of these ranks; the checkpoints have it whole.
        model = None if result.model is None or config.shard != "none" else result.model.cpu()
        _leave(folder / RESULT, _dumped_outcome(replace(result, model=model), [_state_of(each) for each in watchers]))
    return 0


def _leave(file: Path, data: bytes) -> None:
    """Write a file whole, unless another rank was first."""
    aside = file.with_name(f".{file.name}-{os.getpid()}")
    aside.write_bytes(data)
    with suppress(FileExistsError):
        os.link(aside, file)


def _state_of(watcher: Callback) -> dict[str, bytes]:
    """Return the attributes of a watcher, pickled. What cannot be (an open file), or means nothing outside of this
    process (the run), stays as the caller has it."""
    state = {}
    for name, value in vars(watcher).items():
        if not isinstance(value, RunInfo):
            with suppress(TaskNotPortable):
                state[name] = _dumped(value)
    return state


def main() -> int:
    from paceline.world.failure.together import fail_together
    from paceline.world.signals import process_ends_with_run

    process_ends_with_run()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    world = discover(os.environ)
    try:
        return fail_together(world, lambda: work(Path(sys.argv[1])))
    except PacelineError as error:
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
