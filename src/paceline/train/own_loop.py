"""Batches for somebody's own loop: `Engine.batches`, which remembers where it is so that a resume goes on there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.config.settings import DataSettings
from paceline.data.grain import Batch
from paceline.train.feed import Feed, TrainingData
from paceline.train.position import choose_grains
from paceline.train.scaling import for_ranks

if TYPE_CHECKING:
    from paceline.train.engine import Engine


def batches(
    engine: Engine, dataset: Any, epochs: int, collate: Callable[[list[Any]], Any] | None, settings: DataSettings
) -> Iterator[Batch]:
    """This rank's part of every global batch, for as many epochs, from where the engine is."""
    config, _ = for_ranks(settings, engine.link.world.size)
    feed = Feed(
        TrainingData.of(dataset, collate),
        config,
        engine.link,
        grains=choose_grains(config.grains, None, engine.link.world.size, config.regrain),
        seed=engine.config.seed,
    )
    if not engine.is_resumed:
        engine.call_began = engine.epoch
    engine.is_resumed = False
    feed.end_epoch = engine.call_began + epochs
    while engine.epoch < engine.call_began + epochs:
        for batch in feed.batches(engine.epoch, engine.epoch_step):
            engine.epoch_step = batch.step + 1
            yield batch
            if feed.is_stream and engine.is_out_of_data():
                break
        engine.epoch, engine.epoch_step = engine.epoch + 1, 0
    feed.close()
