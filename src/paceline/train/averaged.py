"""`paceline.average`: the mean of a run's last or best checkpoints, validated beside them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt

from paceline.config.settings import Positive, Section
from paceline.core.cloud.address import Place, local_path
from paceline.core.errors import Conflict
from paceline.core.language import translate
from paceline.core.run_folder import RunRecord
from paceline.core.terminal import warn

if TYPE_CHECKING:
    from paceline.config.settings import TrainConfig
    from paceline.train.task import Task
    from paceline.world.link import Link

with warnings.catch_warnings():
    # `json` and `validate` hide methods that pydantic itself has given up; they are the words that users know.
    warnings.filterwarnings("ignore", message='Field name "(json|validate)"', category=UserWarning)

    class AverageOptions(Section):
        """Write the mean of the weights of several checkpoints of RUN as a checkpoint that `eval`, `infer` and `export`
        take, and validate it."""

        run: Place
        """Folder of the run, or its address."""
        last: Positive | None = None
        """The newest so many (`--keep-last` of training keeps them); all that there are if nothing is chosen."""
        best: Positive | None = None
        """Those with the best so many scores."""
        from_step: NonNegativeInt | None = None
        """Only checkpoints of this step and later ones."""
        to_step: NonNegativeInt | None = None
        """Only checkpoints of this step and earlier ones."""
        name: str | None = None
        """Name of the new checkpoint, for `--checkpoint NAME`; `average-last-10`, say, if not set."""
        validate: bool = True  # type: ignore[assignment]
        """Measure it on the run's validation sets, where there are some."""
        statistics: NonNegativeInt = 0
        """Measure batch-norm statistics of the mean on so many batches of training data; 0: the mean of the parts'."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """`auto` takes CUDA where there is one."""
        task: str | None = None
        """Where the task is now (`path/to/file.py:ClassName`), if its file has moved since the run was made."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of a table."""


@dataclass(frozen=True)
class Averaged:
    """The mean of some checkpoints, as a checkpoint."""

    path: Path
    """Of the new checkpoint: `paceline.load(run, checkpoint=averaged.path)`."""
    parts: tuple[Path, ...]
    """Checkpoints that it is the mean of, newest first."""
    scores: tuple[float | None, ...]
    """Monitored score of each part, when it was saved."""
    score: float | None
    """Monitored score of the mean; None if it was not validated."""
    metrics: Mapping[str, float]
    """All metrics of the mean, as `set/metric`; empty if it was not validated."""


def average(
    run: str | Path,
    *,
    last: int | None = None,
    best: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    name: str | None = None,
    validate: bool = True,
    statistics: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    task: Task | None = None,
) -> Averaged:
    """Write the mean of the weights of several checkpoints of a run as one of its checkpoints, and validate it.

    The checkpoints are the `last` so many, the `best` so many by the run's own score, or all; of those of a range of
    steps. `statistics` measures the batch-norm statistics of the mean on so many batches of the training data; with 0
    they are the mean of the parts'. A run whose task was defined in a notebook or a function needs its `task`.
    """
    from paceline.config.python_call import settings_of_call

    values: dict[str, Any] = {
        "run": local_path(run),
        "last": last,
        "best": best,
        "from_step": from_step,
        "to_step": to_step,
        "name": name,
        "validate": validate,
        "statistics": statistics,
        "device": device,
    }
    return average_checkpoints(settings_of_call(AverageOptions, values, "paceline.average"), task)


def average_checkpoints(options: AverageOptions, task: Task | None = None) -> Averaged:
    """Write the mean of the checkpoints that the options choose, validate it, and send it where the run is."""
    from paceline.core.cloud.file_copy import send
    from paceline.train import apply
    from paceline.train import average as means

    record = apply.read_run(options.run)
    chosen = {"last": options.last, "best": options.best, "from_step": options.from_step, "to_step": options.to_step}
    if options.last is not None and options.best is not None:
        raise Conflict("both `--last` and `--best` are given", hint="give one of them")
    name = options.name or means.default_name(**chosen)
    means.check_name(options.run, name)
    parts = means.choose_parts(options.run, **chosen)
    if len(parts) == 1:
        only = f"one checkpoint was chosen, and nothing is averaged: {name} is a copy of {parts[0].path.name}"
        warn(f"{translate(only)}; {translate('choose several: `--last 5` or `--best 5`')}\n")
    weights = means.mean_of(parts)
    if options.statistics:
        with _attached(options, task, record, is_validated=False) as (own, config, link):
            weights = means.with_statistics(own, config, link, options.run, weights, parts[0].path, options.statistics)
    path = means.write_mean(options.run, name, weights, parts)
    score: float | None = None
    metrics: Mapping[str, float] = {}
    if options.validate and any(part.score is not None for part in parts):
        with _attached(options, task, record, is_validated=True) as (own, config, link):
            metrics, score = means.validated(own, config, link, options.run, path)
        if score is not None:
            means.write_mean(options.run, name, weights, parts, score)
    send(path)
    return Averaged(path, tuple(p.path for p in parts), tuple(p.score for p in parts), score, metrics)


@contextmanager
def _attached(
    options: AverageOptions, task: Task | None, record: RunRecord, *, is_validated: bool
) -> Iterator[tuple[Task, TrainConfig, Link]]:
    """The task of a run, its settings, and one rank to use them on."""
    from paceline.train.recorded import settings_of, task_of
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    own = task or task_of(options.run, options.task, record)
    config = settings_of(own, options.run, {**record.settings, "validation": is_validated, "device": options.device})
    with start(discover({}), device=options.device) as link:
        yield own, config, link
