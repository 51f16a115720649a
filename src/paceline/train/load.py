"""`paceline.load`: the trained model of a run, for any program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from paceline.train.task import Task


def load(
    run: str | Path,
    *,
    checkpoint: Literal["best", "last"] | str | Path = "best",
    task: Task | None = None,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    average: int = 1,
) -> torch.nn.Module:
    """Return the model of a run in evaluation mode, with the weights of a checkpoint (their average, if it kept one).

    `run` is a run's folder or address (`s3://bucket/run`), or one of its checkpoints. `checkpoint` is the one with the
    best score (the newest where none has one), the newest (`last`), or one by its path or name. A run knows the file of
    its task; one whose task was defined in a notebook or a function, or is made with arguments, needs its `task`.
    Weights are in fp32 (fp64 for a run in fp64); with `average` they are the mean of so many checkpoints, that one and
    those before it.
    """
    from paceline.core.cloud.address import address_of, local_path
    from paceline.core.cloud.run_copy import bring_run
    from paceline.core.run_folder import CHECKPOINTS
    from paceline.train import apply
    from paceline.train.checkpoint.format import DIGESTS
    from paceline.train.fit import NotATask
    from paceline.train.recorded import settings_of, task_of
    from paceline.train.task import Task
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    if not isinstance(run, str | os.PathLike):
        raise apply.NoRun(f"{run!r} is no path of a run")
    if task is not None and not isinstance(task, Task):
        raise NotATask(task, "paceline.load")
    _check(checkpoint, device)
    folder = local_path(run)
    which: apply.Which = checkpoint
    if address_of(folder) is not None:
        bring_run(folder.parent.parent if folder.parent.name == CHECKPOINTS else folder)
    if (folder / DIGESTS).is_file():
        folder, which = folder.resolve().parent.parent, folder.resolve()
    record = apply.read_run(folder)
    task = task or task_of(folder, None, record)
    settings = settings_of(task, folder, {**record.settings, "out": folder})
    precision = settings.precision if settings.precision == "fp64" else None
    plain = settings.model_copy(update={"level": 0, "precision": precision, "cuda_graphs": False})
    with start(discover({}), device=device) as link:
        engine = apply.restore_for_use(task, plain, link, apply.find_checkpoint(folder, which), average)
        model = engine.model
        engine.release()
    return model.eval()


def _check(checkpoint: object, device: object) -> None:
    """Refuse arguments that nothing can be done with, all at once."""
    from paceline.config.problems import Problem
    from paceline.config.python_call import CallInvalid

    wrong = []
    if not isinstance(checkpoint, str | os.PathLike):
        wrong.append(Problem("checkpoint", "must be best, last, a path or a name", given=repr(checkpoint)))
    if device not in ("auto", "cpu", "cuda"):
        wrong.append(Problem("device", "must be one of auto, cpu or cuda", given=repr(device)))
    if wrong:
        raise CallInvalid(wrong, "paceline.load")
