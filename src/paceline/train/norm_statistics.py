"""Batch-norm statistics of weights that never trained a step: a mean of weights, which no running statistics belong to.

The running statistics of a run are those of its weights as they were, one after the other; a mean of weights puts out
other activations. So they are measured: each of some batches of the training data, fixed ones of a grain's size, runs
through the model in training mode, and a layer's statistics are the mean over these batches of its batch mean and its
unbiased batch variance, as `torch.optim.swa_utils.update_bn` has it. A batch runs on one rank, and the sums are added
in float64 in the order of the batches, so that the result is the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.core.keys import key
from paceline.core.together import Exclusion
from paceline.core.torch_private import BatchNorm
from paceline.data.fetch import seed_everything
from paceline.train.stepper import Stepper
from paceline.train.task import Task
from paceline.train.validate import FixedSet


class StatisticsNeedLength(PacelineError):
    """A mean of weights with batch norms, and training data of which there are no fixed batches."""

    excludes = (
        Exclusion(
            "`--swa-start` of a model with batch norm",
            "training data without a length",
            "mathematics",
            "Batch-norm statistics of the mean are those of fixed batches of the training data, and a stream has none.",
        ),
    )
    sentence = "`swa_start` measures batch-norm statistics on fixed batches of training data, and this data is a stream"
    hint = "use data with __len__ and __getitem__, or `--ema 0.999`"


def norm_layers(model: nn.Module) -> dict[str, BatchNorm]:
    """Return the layers of a model that keep running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.track_running_stats and module.running_mean is not None
    }


def chosen_batches(num_batches: int, most: int) -> range:
    """Return the numbers of at most so many batches, evenly spread over all."""
    return range(0, num_batches, max(1, num_batches // most))[:most]


def measure_statistics(task: Task, stepper: Stepper, data: FixedSet, most: int, seed: int) -> dict[str, Tensor]:
    """Return the statistics of the model as `stepper.evaluating` shows it, by buffer; the model's own stay as they are.

    A layer that is called several times for a batch has the statistics of its last call. All ranks must call it.
    """
    link, model = stepper.link, stepper.model
    layers = norm_layers(model)
    trained = [module for module in model.modules() if module.training] or list(model.modules())
    numbers = chosen_batches(data.plan.num_steps, most)
    total: Tensor | None = None
    num_grains = 0
    with stepper.evaluating(), _last_batch_only(layers, trained), closing(data.loader):
        batches = data.loader.run(data.plan, numbers[link.world.rank :: link.world.size])
        for _ in range(0, len(numbers), link.world.size):
            parts: list[Tensor] = []
            batch = next(batches, None)
            for grain in () if batch is None else batch.grains:
                seed_everything(key(seed, 0 if batch is None else batch.step))
                task.loss(model, grain)
                parts.append(torch.cat([each.double().cpu() for layer in layers.values() for each in _buffers(layer)]))
            for part in (each for of_rank in link.gather_objects(parts) for each in of_rank):
                total = part if total is None else total + part
                num_grains += 1
    assert total is not None
    named = [(f"{name}.{each}", layer.get_buffer(each)) for name, layer in layers.items() for each in _NAMES]
    means = (total / num_grains).split([buffer.numel() for _, buffer in named])
    return {name: mean.to(buffer) for (name, buffer), mean in zip(named, means, strict=True)}


_NAMES = ("running_mean", "running_var")


def _buffers(layer: BatchNorm) -> list[Tensor]:
    return [layer.get_buffer(name) for name in _NAMES]


@contextmanager
def _last_batch_only(layers: dict[str, BatchNorm], trained: list[nn.Module]) -> Iterator[None]:
    """Modules in training mode, and statistics that are those of the last batch alone; then all as it was."""
    buffers = [
        buffer for layer in layers.values() for buffer in (*_buffers(layer), layer.get_buffer("num_batches_tracked"))
    ]
    saved = [buffer.clone() for buffer in buffers]
    momenta = {name: layer.momentum for name, layer in layers.items()}
    modes = [(module, module.training) for module in trained]
    for layer in layers.values():
        layer.momentum = 1.0
    for module in trained:
        module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for name, layer in layers.items():
            layer.momentum = momenta[name]
        for buffer, before in zip(buffers, saved, strict=True):
            buffer.copy_(before)
