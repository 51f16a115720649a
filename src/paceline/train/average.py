"""The mean of the weights of several checkpoints of a run, as a checkpoint that everything takes which uses a run.

It lies beside the others under a name of its own (`checkpoints/average-last-10`): no run goes on from it, and none
removes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.config.settings import TrainConfig
from paceline.core.disk import sync
from paceline.core.errors import Conflict, NotFound, PacelineError
from paceline.core.run_folder import RunFolder
from paceline.core.units import counted
from paceline.data.dataset import DatasetTraits
from paceline.data.torch_loader import take_out
from paceline.train import apply
from paceline.train import task as tasks
from paceline.train.checkpoint import reader
from paceline.train.checkpoint.format import (
    DIGESTS,
    REPLACED,
    STATE,
    TENSORS,
    WRITING,
    StateFile,
    by_score,
    entries_of,
    entries_to_json,
    listed,
    score_of,
    step_of,
)
from paceline.train.checkpoint.snapshot import refill, write_file
from paceline.train.norm_statistics import measure_statistics, norm_layers
from paceline.train.validate import fixed_set
from paceline.world.link import Link


def _too_few(run: Path, wanted: int, names: Sequence[str], kind: str) -> NotFound:
    """Return the error of a mean of more checkpoints than the `names` that there are to choose from."""
    be = "is" if len(names) == 1 else "are"
    there = f"there {be} only {', '.join(names)} {kind}" if names else f"there is none {kind}"
    keep = f"train with `--keep-last {max(wanted, 10)}`"
    hint = keep if len(names) < 2 else f"average {len(names)}, or {keep}"
    return NotFound(f"{counted(wanted, 'checkpoint')} of {run} cannot be averaged: {there.rstrip()}", hint=hint)


class ShapesDiffer(PacelineError):
    """Checkpoints of models that are not the same, as those of a model that grows from stage to stage."""

    name: str
    first: Path
    second: Path
    sentence = "{name} has another shape in {first.name} than in {second.name}: they have no mean"
    hint = "average checkpoints of one stage: `--from-step`, `--to-step`"


class NameTaken(PacelineError):
    """A name for the mean that a checkpoint of the run has, or that cannot be one."""

    name: str
    why: str
    sentence = "the mean cannot be called {name!r}: {why}"
    hint = "choose another `--name`, such as `--name average`"


class NothingToMeasureOn(PacelineError):
    """Statistics are to be measured, and there is nothing to measure or nothing to do it on."""

    why: str
    sentence = "batch-norm statistics cannot be measured: {why}"
    hint = "leave out `--statistics`: the mean then has the mean of its parts' statistics"


@dataclass(frozen=True)
class Part:
    """A checkpoint that goes into a mean."""

    path: Path
    step: int
    score: float | None
    """Of the monitored metric, when it was saved."""


def choose_parts(
    folder: Path,
    *,
    last: int | None = None,
    best: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Part]:
    """Return the checkpoints that are meant, newest first: all of a range of steps, or the last or best of it."""
    paths = [
        path
        for path in listed(RunFolder(folder).checkpoints)
        if (from_step is None or step_of(path) >= from_step) and (to_step is None or step_of(path) <= to_step)
    ]
    kind = ""
    if best is not None:
        modes = [mode for path in paths for score, mode in [score_of(path)] if score is not None]
        paths = by_score(paths, modes[0]) if modes else []
        kind = "with a score"
    number = best if best is not None else last if last is not None else max(2, len(paths))
    if len(paths) < number:
        raise _too_few(folder, number, [path.name for path in paths], kind)
    newest_first = sorted(paths[:number], key=step_of, reverse=True)
    return [Part(path, step_of(path), score_of(path)[0]) for path in newest_first]


def default_name(*, last: int | None, best: int | None, from_step: int | None, to_step: int | None) -> str:
    """Return the name of a mean: `average-best-5`, `average-from-1000-to-2000`."""
    words = [("last", last), ("best", best), ("from", from_step), ("to", to_step)]
    chosen = [f"{word}-{number}" for word, number in words if number is not None]
    return "-".join(["average", *(chosen or ["all"])])


def check_name(folder: Path, name: str) -> None:
    """Refuse names that would hide a checkpoint of the run, that mean another one, or leave its folder."""
    if name in ("best", "last"):
        raise NameTaken(name, f"`--checkpoint {name}` is the {name} checkpoint of the run itself")
    if "step-" in name or name.startswith(".") or Path(name).name != name or not name:
        raise NameTaken(name, "names of checkpoints are `step-...`, and a name is one word without /")


def mean_of(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Return the mean of the weights of checkpoints, by name: added in float64, newest first; of a run with a moving
    average, the mean of that. All must have the same names and shapes."""
    each = [apply.read_weights(part.path) for part in parts]
    for part, weights in zip(parts, each, strict=True):
        for name in sorted(each[0].keys() ^ weights.keys()):
            has, lacks = (parts[0], part) if name in each[0] else (part, parts[0])
            raise Conflict(
                f"{name} is in {has.path.name} and not in {lacks.path.name}: they have no mean",
                hint="average checkpoints of one stage: `--from-step`, `--to-step`",
            )
        for name, tensor in each[0].items():
            if weights[name].shape != tensor.shape:
                raise ShapesDiffer(name, parts[0].path, part.path)
    return apply.mean_weights(each)


def with_statistics(
    task: tasks.Task,
    config: TrainConfig,
    link: Link,
    folder: Path,
    weights: Mapping[str, Tensor],
    like: Path,
    most: int,
) -> dict[str, Tensor]:
    """Return weights with batch-norm statistics measured on training data: see `norm_statistics`. All ranks must call
    it. `like` is a checkpoint of the same model."""
    engine = apply.restore_for_use(task, config, link, like, weights=weights, purpose="train")
    if not norm_layers(engine.model):
        raise NothingToMeasureOn("the model has none")
    first = tasks.stages_of(task)[-1].data
    data, _ = take_out(first() if callable(first) else first)
    if not DatasetTraits(data).is_map_style:
        raise NothingToMeasureOn("the training data has no length")
    batches = fixed_set(task, engine, config, apply.grains_of(folder, config), "training data", data)
    return {**weights, **measure_statistics(task, engine, batches, most, config.seed)}


def validated(
    task: tasks.Task, config: TrainConfig, link: Link, folder: Path, checkpoint: Path
) -> tuple[dict[str, float], float | None]:
    """Return all metrics of a checkpoint, and the one that the run monitors. All ranks must call it."""
    metrics = apply.evaluate_run(task, config, link, folder, checkpoint)
    first = next(iter(metrics), "").rpartition("/")[0]
    return metrics, metrics.get(config.monitor or f"{first}/{task.monitor}")


def write_mean(
    folder: Path, name: str, weights: Mapping[str, Tensor], parts: Sequence[Part], score: float | None = None
) -> Path:
    """Write weights as a checkpoint of a run, whole or not at all; return its path. One of that name is replaced, and
    counts (`apply.find_checkpoint`) until the new one has its name."""
    newest = reader.load(parts[0].path, [], verify=False)
    mode = score_of(parts[0].path)[1]
    try:
        more: Mapping[str, Mapping[str, Tensor]] = {"task": reader.load(parts[0].path, ["task"]).parts["task"]}
    except reader.PartMissing:
        more = {}
    state: dict[str, Any] = {**newest.state, "average": [part.path.name for part in parts]}
    final = RunFolder(folder).checkpoints / name
    aside = final.with_name(WRITING + name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    snapshots: dict[str, Any] = {}
    refill(snapshots, {"model": weights, **more})
    entries = entries_of({part + TENSORS: each.write(aside / (part + TENSORS)) for part, each in snapshots.items()})
    values = StateFile(newest.step, score, mode, state, None)
    digest = write_file(aside / STATE, replace(values, files=entries).to_json())
    write_file(aside / DIGESTS, entries_to_json({**entries, **entries_of({STATE: digest})}))
    sync(aside)
    replaced = final.with_name(REPLACED + name)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # left by a process that was killed when the new one was there
        final.rename(replaced)
    aside.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final
