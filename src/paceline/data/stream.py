"""Batches from iterable data of unknown length.

A data set with a `shard(rank, size)` method gives each rank its own part. Without one, every rank reads the whole
stream and keeps its own grains, so that the result does not depend on the number of ranks as long as the stream
itself is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from paceline.core.keys import key
from paceline.data.collate import stack_collate
from paceline.data.dataset import Collate, DatasetTraits
from paceline.data.fetch import seed_everything
from paceline.data.grain import Batch, Grain
from paceline.data.loader import CudaUploads, prefetch
from paceline.observe.clock import Clock


class Stream:
    """Cuts an iterable into global batches of `global_batch` samples in `num_grains` grains."""

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        global_batch: int,
        num_grains: int,
        collate: Collate | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        rank: int = 0,
        size: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._dataset = dataset
        self._global_batch = global_batch
        self._num_grains = num_grains
        self._collate = collate or stack_collate
        self._seed = seed
        self._device = device or torch.device("cpu")
        self._rank = rank
        self._size = size
        self._clock = clock or Clock()
        self._sharded = DatasetTraits(dataset).sharded
        self._is_sharded = self._sharded is not None

    def run(self, *, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches from step `start` on; the steps before it are read and passed over."""
        batches = self._batches(epoch, start)
        return batches if self._device.type == "cpu" else prefetch(batches, CudaUploads(self._device), self._clock)

    def empty(self, epoch: int, step: int) -> Batch:
        """Return the batch of a rank whose data has ended while another's has not."""
        return Batch(
            epoch, step, self._num_grains, 0, float(self._global_batch), [], has_next=False, knows_others=False
        )

    def _read(self, epoch: int, per_step: int) -> Iterator[list[Any]]:
        """Yield the samples of each step. Random numbers are keyed by the step, since training draws in between."""
        owner = self._rank + 1 if self._is_sharded else 0
        seed_everything(key(self._seed, epoch, owner))
        source = iter(self._dataset if self._sharded is None else self._sharded.shard(self._rank, self._size))
        for step in count():
            seed_everything(key(self._seed, epoch, owner, step))
            samples = list(islice(source, per_step))
            if not samples:
                return
            yield samples

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        own_numbers = range(self._rank, self._num_grains, self._size)
        sizes = [len(piece) for piece in np.array_split(np.arange(self._global_batch), self._num_grains)]
        read_numbers = own_numbers if self._is_sharded else range(self._num_grains)
        step_sizes = {number: sizes[number] for number in read_numbers}
        source = self._read(epoch, sum(step_sizes.values()))
        for _ in islice(source, start):
            pass
        step = start
        samples = next(source, [])
        while samples:
            following = next(source, [])
            grains = []
            offset = num_filled = 0
            for number, wanted in step_sizes.items():
                piece = samples[offset : offset + wanted]
                num_filled += bool(piece)
                if piece and number in own_numbers:
                    first = (step * self._global_batch) + offset
                    ids = np.arange(first, first + len(piece), dtype=np.int64)
                    grains.append(Grain(self._collate(piece), number, ids))
                offset += wanted
            num_samples = self._global_batch if self._is_sharded else len(samples)
            yield Batch(
                epoch,
                step,
                # The last batch may not fill all grains: who counts them (batch norm) must not wait for an empty one.
                num_grains=self._num_grains if self._is_sharded else num_filled,
                num_samples=num_samples,
                count=float(num_samples),
                grains=grains,
                is_last=not following and (self._size == 1 or not self._is_sharded),
                has_next=bool(following),
                own_count=float(sum(len(grain.samples) for grain in grains)),
                knows_others=self._size == 1 or not self._is_sharded,
            )
            samples = following
            step += 1
