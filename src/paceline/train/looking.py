"""A look at the model between two steps: as validation sees it, or as one process would have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.train.engine import Engine


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """The model in evaluation mode with complete statistics (and averaged weights); all ranks must enter."""
    engine.sync()
    engine.statistics.total()
    training = [module for module in engine.model.modules() if module.training]
    engine.model.eval()
    average, shards = engine.average, engine.shards
    averaged: AbstractContextManager[None] = nullcontext()
    if average is not None:
        averaged = average.swapped(engine.model if shards is None else shards.tensors)
    try:
        with torch.no_grad(), engine.autocast(), averaged, engine.strategy.whole_weights():
            yield
    finally:
        for module in training:
            module.training = True
        engine.statistics.share()


@contextmanager
def whole_statistics(engine: Engine) -> Iterator[None]:
    """Batch-norm statistics as one process would have them; all ranks must enter."""
    engine.sync()
    engine.statistics.total()
    try:
        yield
    finally:
        engine.statistics.share()
