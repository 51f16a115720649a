"""From settings to the way in which ranks come to one model: gradients, parameters, or nothing to reduce."""

from __future__ import annotations

import torch

from paceline.config.settings import EngineConfig
from paceline.optim.ema import WeightAverage
from paceline.parallel.averaged import Averaged
from paceline.parallel.joined_norm import JoinedNorms
from paceline.parallel.sharded import Sharded, Shards, shard
from paceline.parallel.strategy import Alone, Strategy
from paceline.parallel.summed import Summed
from paceline.speed.master import Masters
from paceline.world.link import Link
from paceline.world.start import patience


def choose(
    parameters: list[torch.nn.Parameter],
    config: EngineConfig,
    link: Link,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    masters: Masters | None,
    shards: Shards | None,
) -> Strategy:
    """The strategy for these ranks; all must call it."""
    if not link.has_group:
        return Alone(parameters)
    if shards is not None:
        return Sharded(parameters, link, shards)
    if config.reduce == "grad":
        return Summed(parameters, link, wire=config.wire)
    kept = model.state_dict().keys()  # buffers that are not persistent are constants
    return Averaged(
        parameters,
        link,
        config,
        optimizer=optimizer,
        buffers={name: buffer for name, buffer in model.named_buffers() if name in kept},
        weight_average=() if average is None else list(average.tensors.values()),
        timeout=patience(config.timeout_s, link.device),
        weights_changed=(lambda: None) if masters is None else masters.push_weights,
    )


def join_norms(model: torch.nn.Module, config: EngineConfig, link: Link) -> JoinedNorms | None:
    """Batch norm over groups of ranks, if the settings ask for it; all must call it."""
    asked, world = config.sync_batchnorm, link.world
    if asked == "no" or not link.has_group:
        return None
    return JoinedNorms(model, world, world.size if asked == "all" else asked, patience(config.timeout_s, link.device))


def shard_model(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, link: Link
) -> Shards | None:
    """The model cut up over the ranks, if the settings ask for it and there are several; all must call it."""
    if config.shard == "none" or not link.has_group:
        return None
    return shard(model, optimizer, link, config.shard_modules)
