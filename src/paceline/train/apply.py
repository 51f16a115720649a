"""Use a trained run: its validation metrics again, or predictions, at any world size.

Nothing of the run is changed, and nothing of a training step is needed: no training data, no optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from paceline.config.mode import Purpose
from paceline.config.settings import TrainConfig
from paceline.core.cloud.address import address_of, local_path, shown
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import InvalidSetting, NotFound, PacelineError, TaskContract
from paceline.core.keys import key
from paceline.core.run_folder import NotARun, RunFolder, RunRecord
from paceline.core.terminal import warn
from paceline.core.units import counted
from paceline.data.collate import stack_collate
from paceline.data.fetch import seed_everything
from paceline.data.grain import Grain, map_tensors
from paceline.data.torch_loader import take_out
from paceline.train import setup
from paceline.train import task as tasks
from paceline.train.autotune.autotuner import precision_for_use
from paceline.train.checkpoint import reader, state
from paceline.train.checkpoint.format import DIGESTS, REPLACED, listed
from paceline.train.exchange import is_export
from paceline.train.position import Position
from paceline.train.stepper import Stepper
from paceline.train.task import Surroundings, Task, overrides
from paceline.train.validate import FixedSet, Validation, fixed_set
from paceline.world.link import Link

Which = Literal["best", "last"] | str | Path
"""The checkpoint with the best score (the newest one where none has a score), the newest one, or one by its path (or by
its name in the run)."""
ROUND = 8
"""Batches that each rank predicts before the results are brought together."""


class NoRun(PacelineError):
    """A folder that is no run, or none that can be used."""

    what: str | PacelineError
    is_export: bool = False
    sentence = "{what}"
    hint = "{advice}"

    @property
    def advice(self) -> str:
        if self.is_export:
            return "it is an export, for other programs, `--init-from` and a recipe's `load`: give the run itself"
        return "give the folder of a run (the one with run.json in it); `paceline runs` lists them"


class NoCheckpoint(PacelineError):
    """A run without the checkpoint that was asked for."""

    what: str
    advice: str
    sentence = "{what}"
    hint = "{advice}"


# -- a run and its checkpoints -----------------------------------------------------------------------------------------


def read_run(folder: Path) -> RunRecord:
    """Return the record of a run that has something to use; one at an address is brought first."""
    bring_run(folder)
    try:
        record = RunFolder(folder).check(may_exist=True)
    except NotARun as error:
        raise NoRun(error, is_export=is_export(folder)) from error
    if record is None:
        why = "it is empty" if folder.exists() else "there is no such folder"
        if RunFolder(folder).is_run:
            why = "it failed at its start"
        raise NoRun(f"{shown(folder)} is not a run: {why}")
    return record


def bring(link: Link, folder: Path) -> None:
    """Bring the run in `folder` to this machine, if it is the copy of an address: one rank per machine does."""
    if address_of(folder) is not None:
        if link.world.local_rank == 0:
            bring_run(folder)
        link.barrier()


def choose_checkpoint(link: Link, folder: Path, which: Which) -> Path:
    """Return the sound checkpoint that `which` means, the same on all ranks: the first looks, and names broken ones."""
    checkpoint: Path | PacelineError | None = None
    if link.is_first:
        try:
            checkpoint = find_checkpoint(folder, which)
        except PacelineError as error:
            checkpoint = error
    checkpoint = link.broadcast_object(checkpoint)
    if isinstance(checkpoint, PacelineError):
        raise checkpoint
    assert checkpoint is not None
    return checkpoint


def find_checkpoint(folder: Path, which: Which) -> Path:
    """Return the sound checkpoint of a run that `which` means; broken ones are named on stderr."""
    read_run(folder)
    checkpoints = RunFolder(folder).checkpoints
    if which not in ("best", "last"):
        return _named_checkpoint(folder, checkpoints, local_path(which))
    found = reader.best(checkpoints) if which == "best" else reader.newest(checkpoints)
    if which == "best" and found.checkpoint is None:
        newest = reader.newest(checkpoints)
        broken = {error.path: error for error in (*found.broken, *newest.broken)}
        found = reader.Found(newest.checkpoint, list(broken.values()))
        if found.checkpoint is not None:
            name = found.checkpoint.path.name
            warn(f"no checkpoint of {shown(folder)} has a validation score: taking the last one, {name}\n")
    for error in found.broken:
        warn(f"skipped a broken checkpoint: {error}\n")
    if found.checkpoint is None:
        raise NoCheckpoint(*_none_found(folder, bool(found.broken)))
    return found.checkpoint.path


def _named_checkpoint(folder: Path, checkpoints: Path, place: Path) -> Path:
    """Return a checkpoint by its path, or by its name in the run."""
    # A mean that is being replaced counts until the new one has its name.
    for path in (place, checkpoints / place, checkpoints / f"{REPLACED}{place}"):
        if (path / DIGESTS).exists():
            return path
    names = ", ".join(path.name for path in listed(checkpoints)) or "none"
    hint = f"checkpoints of {shown(folder)}: {names}"
    raise NoCheckpoint(f"{shown(place)} is not a checkpoint", hint)


def read_weights(checkpoint: Path, average: int = 1) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint by name (their moving average, if the run kept one), or the mean of so many:
    of it and of those before it."""
    if average == 1:
        return _weights(_load(checkpoint, verify=True))
    return mean_weights([_weights(_load(each, verify=True)) for each in last_checkpoints(checkpoint, average)])


def last_checkpoints(checkpoint: Path, number: int) -> list[Path]:
    """Return a checkpoint and those before it, so many together, the newest first."""
    if number < 1:
        raise InvalidSetting(
            f"`average` is {number}", hint="give the number of checkpoints to take the mean of, 1 or more"
        )
    older = [path for path in listed(checkpoint.parent) if path.name <= checkpoint.name]
    if len(older) < number:
        raise NotFound(
            f"{counted(number, 'checkpoint')} up to {checkpoint.name} cannot be averaged: there "
            f"{'is' if len(older) == 1 else 'are'} only {', '.join(path.name for path in older)}",
            hint=f"average fewer, or train with `--keep-last {number}`",
        )
    return older[:number]


def mean_weights(each: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of weights by name, added in float64; whole numbers are the newest's, which is the first."""
    mean = dict(each[0])
    for name, tensor in each[0].items():
        if tensor.is_floating_point():
            total = torch.zeros_like(tensor, dtype=torch.float64)
            for weights in each:
                total += weights[name]
            mean[name] = (total / len(each)).to(tensor.dtype)
    return mean


def _weights(loaded: reader.Checkpoint) -> dict[str, torch.Tensor]:
    return {**loaded.parts["model"], **loaded.parts.get("ema", {})}


def _none_found(folder: Path | str, has_broken: bool) -> tuple[str, str]:
    """Return (what, hint) of the error where no checkpoint can be used."""
    folder = shown(folder)
    if has_broken:
        hint = "train it again: every one that was saved is damaged"
        return f"{folder} has no sound checkpoint", hint
    hint = "let it train until the first one is saved (`--save-every-steps`)"
    return f"{folder} has no checkpoint", hint


def restore_for_use(
    task: Task,
    config: TrainConfig,
    link: Link,
    checkpoint: Path,
    average: int = 1,
    weights: Mapping[str, torch.Tensor] | None = None,
    purpose: Purpose = "infer",
) -> Stepper:
    """Return a stepper whose model has a checkpoint's weights (their average, if the run kept one), or the mean of so
    many checkpoints; not for training. Other `weights` of the same model take their place.

    The weights are in the precision of the settings; call the model inside `stepper.evaluating()`, which autocasts.
    """
    tasks.check_ranks(task, config, link)
    attach(task, config, link, purpose)
    loaded = _load(checkpoint, verify=link.is_first)
    position = Position.load(loaded.state["position"])
    stepper = _stepper_for_use(task, config, link, loaded.state.get("choice"), position.num_begun_stages)
    stepper.resume_at(loaded.step)
    if weights is None:
        weights = _weights(loaded) if average == 1 else read_weights(checkpoint, average)
    state.restore_weights(stepper, weights)
    tasks.load_state(task, dict(loaded.parts.get("task", {})))
    return stepper


def restore_model(task: Task, config: TrainConfig, link: Link, path: Path, purpose: Purpose) -> Stepper:
    """Return a stepper whose model has the weights of a file of the task's own kind, which no run is around: see
    `ReadsModels`."""
    if not isinstance(task, tasks.ReadsModels):
        raise TaskContract(f"task {type(task).__name__} cannot read {path}", hint="inherit from `paceline.ReadsModels`")
    tasks.check_ranks(task, config, link)
    attach(task, config, link, purpose)
    stepper = _stepper_for_use(task, config, link, choice=None, num_stages=0)
    weights = task.read_weights(path)
    assert weights is not None
    state.restore_weights(stepper, weights)
    return stepper


def _stepper_for_use(task: Task, config: TrainConfig, link: Link, choice: Any, num_stages: int) -> Stepper:
    """Return a stepper with the task's model, whose weights are still to be loaded."""
    plain = {"ema": 0.0, "swa_start": None, "checkpoint_activations": (), "reduce": "grad", "shard": "none"}
    stepper = Stepper(config.model_copy(update=plain), link=link)
    if config.level == 4 or (config.level == "auto" and choice is not None and link.device.type == "cuda"):
        stepper.settle(precision_for_use(choice, config, link.device))
    torch.manual_seed(config.seed)
    model = task.model().to(link.device)
    for number in range(num_stages):  # a model that grows has its shape before its weights are loaded
        setup.begin_stage(task, config, model, number)
    model.eval()
    # An optimizer that keeps nothing; it is never called.
    stepper.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    stepper.prepared.strategy.detach()
    return stepper


def attach(task: Task, config: TrainConfig, link: Link, purpose: Purpose = "infer") -> None:
    """Attach a task to a run that is used. Lines of the task go to stderr, beside the results."""

    def say(text: str) -> None:
        if link.is_first:
            warn(f"{text}\n")

    task.attach(Surroundings(config, link, say, purpose=purpose))


def example_inputs(task: Task, config: TrainConfig, link: Link) -> tuple[Any, ...]:
    """Return what the task's model is called with, of a few samples: see `Task.example_inputs`."""
    data = take_out(_infer_data(task))
    samples = np.arange(min(2, len(data.dataset)), dtype=np.int64)
    collate = task.collate or data.collate or stack_collate
    grain = Grain(collate([data.dataset[int(number)] for number in samples]), 0, samples).to(link.device)
    if not overrides(task, "example_inputs") and isinstance(grain.data, Mapping) and "x" not in grain.data:
        entries = [str(entry) for entry in grain.data]
        advice = "give the task `def example_inputs(self, grain)` that returns a tuple, such as "
        advice += f"`(grain.{entries[0] if entries else 'x'},)`"
        if isinstance(task, tasks.Exports):
            advice = "leave out `--format`: the task has a form of its own; or give it `example_inputs(grain)`"
        raise TaskContract(
            f"the inputs of the model of {type(task).__name__} are unknown: its grains have no `x`, but "
            f"{', '.join(f'`{entry}`' for entry in entries) or 'nothing'}",
            hint=advice,
        )
    return tuple(task.example_inputs(grain))


def _infer_data(task: Task) -> Any:
    data = task.infer_data()
    if data is None:
        raise TaskContract(
            f"{type(task).__name__} has neither `infer_data` nor validation sets",
            hint="give the task an `infer_data()`, or name a function that returns a data set: "
            "`--data file.py:function`",
        )
    return data


def _load(checkpoint: Path, *, verify: bool) -> reader.Checkpoint:
    """Load all parts but those of a training step; not every run has an average, not every task a state."""
    parts = ["model", "ema", "task"]
    while True:
        try:
            return reader.load(checkpoint, parts, verify)
        except reader.PartMissing as missing:
            if missing.part == "model":
                raise
            parts.remove(missing.part)


# -- what it is used for -----------------------------------------------------------------------------------------------


def evaluate_run(
    task: Task,
    config: TrainConfig,
    link: Link,
    folder: Path,
    which: Which = "best",
    sets: Mapping[str, Any] | None = None,
    *,
    average: int = 1,
) -> dict[str, float]:
    """Return metrics, as `set/metric`, of the task's validation sets or of `sets`.

    The same numbers on every rank and at any world size, and the same as training gave for this checkpoint.
    """
    grains = grains_of(folder, config)
    checkpoint = choose_checkpoint(link, folder, which)
    stepper = restore_for_use(task, config, link, checkpoint, average, purpose="eval")
    return evaluate_stepper(task, config, stepper, grains, sets)


def evaluate_stepper(
    task: Task, config: TrainConfig, stepper: Stepper, grains: int, sets: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return metrics of the model in a stepper, as `evaluate_run` does of a checkpoint."""
    validation = Validation(task, stepper, config, grains, tasks.val_data_of(task) if sets is None else sets)
    if validation.is_empty:
        raise TaskContract(
            f"{type(task).__name__} has no validation sets",
            hint="give the task a `val_data()` that returns data sets by name",
        )
    with closing(validation):
        metrics = validation.run()
    tasks.report(task)
    return metrics


def predict_run(
    task: Task,
    config: TrainConfig,
    link: Link,
    folder: Path,
    which: Which = "best",
    data: Any = None,
    *,
    average: int = 1,
) -> Iterator[tuple[int, Any]]:
    """Yield (index, prediction) of every sample, in the order of `data`; the task's `infer_data` if it is None.

    All ranks must iterate to the end; the results come out on the first.
    """
    grains = grains_of(folder, config)
    stepper = restore_for_use(task, config, link, choose_checkpoint(link, folder, which), average)
    return predict_stepper(task, config, stepper, grains, data)


def predict_stepper(
    task: Task, config: TrainConfig, stepper: Stepper, grains: int, data: Any = None
) -> Iterator[tuple[int, Any]]:
    """Yield predictions of the model in a stepper, as `predict_run` does of a checkpoint."""
    if not overrides(task, "predict"):
        raise TaskContract(
            f"{type(task).__name__} has no `predict`",
            hint="give it `def predict(self, model, grain)`, which returns one entry per sample of the grain",
        )
    data = _infer_data(task) if data is None else data
    batches = fixed_set(task, stepper, config, grains, "the data to predict", data, in_order=True)
    return _predict(task, stepper, batches, config.limit_batches)


def grains_of(folder: Path, config: TrainConfig) -> int:
    """Return the grains per step of the run, which determine the size of its validation batches."""
    return int(read_run(folder).grains or config.grains or 1)


def _predict(task: Task, stepper: Stepper, each: FixedSet, limit_batches: int | None) -> Iterator[tuple[int, Any]]:
    """Predict in rounds of some batches per rank. A round covers consecutive samples, so sorted rounds are in order."""
    link, world = stepper.link, stepper.link.world
    steps = each.plan.num_steps if limit_batches is None else min(each.plan.num_steps, limit_batches)
    with closing(each.loader):
        batches = each.loader.run(each.plan, range(world.rank, steps, world.size))
        for _ in range(0, steps, ROUND * world.size):
            # Entered once a round, by ranks without a batch too: around a `yield` it would turn gradients off for
            # whoever iterates.
            with stepper.evaluating():
                parts = [
                    _predict_grain(task, stepper, grain, batch.step)
                    for batch in islice(batches, ROUND)
                    for grain in batch.grains
                ]
            pairs = [
                pair
                for rank_parts in link.gather_objects(parts)
                for samples, prediction in rank_parts
                for pair in zip(samples, prediction, strict=True)
            ]
            if link.is_first:
                yield from sorted(pairs, key=lambda pair: int(pair[0]))
    tasks.report(task)


def _predict_grain(task: Task, stepper: Stepper, grain: Grain, step: int) -> tuple[list[int], Any]:
    seed_everything(key(stepper.config.seed, step))  # as validation does: a prediction may be drawn
    prediction = task.predict(stepper.model, grain)
    is_tensor = isinstance(prediction, torch.Tensor) and prediction.dim() > 0
    if not (is_tensor or isinstance(prediction, list)) or len(prediction) != len(grain):
        shape = f"tensor of shape {tuple(prediction.shape)}" if isinstance(prediction, torch.Tensor) else ""
        length = f"list of {len(prediction)}" if isinstance(prediction, list) else type(prediction).__name__
        raise TaskContract(
            f"`predict` returned a {shape or length} for {counted(len(grain), 'sample')}",
            hint="return a tensor whose first axis are the samples, or a list with one entry per sample",
        )
    # A copy: a slice that travels to another rank would take the whole tensor with it.
    return grain.samples.tolist(), map_tensors(lambda tensor: tensor.detach().cpu().clone(), prediction)
