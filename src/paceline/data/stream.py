"""Batches from iterable data of unknown length.

A data set with a `shard(rank, size)` method gives each rank its own part. Without one, every rank reads the whole
stream and keeps its own grains, so that the result does not depend on the number of ranks as long as the stream
itself is the same everywhere. A stream that knows where it is (`Stateful`) is resumed by its own state, others by
reading again what was trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from paceline.core.keys import key
from paceline.core.sum_tree import even_starts
from paceline.data.collate import stack_collate
from paceline.data.dataset import Collate, DatasetTraits, KnowsEpochs, Stateful
from paceline.data.fetch import seed_everything
from paceline.data.grain import Batch, Grain
from paceline.data.loader import CudaUploads, prefetch
from paceline.observe.clock import Clock


def _has_buffer(dataset: Any) -> bool:
    """Return True for Hugging Face's streams after `shuffle`: their state says where reading goes on, but not which
    samples wait in the buffer. These would be left out; reading everything again gives the same order."""
    link = vars(dataset).get("_ex_iterable") if hasattr(dataset, "__dict__") else None
    while link is not None and "BufferShuffled" not in type(link).__name__:
        link = vars(link).get("ex_iterable")
    return link is not None


def _as_it_is_now(state: Any) -> Any:
    """Return a copy of a state: a stream may go on writing to the one that it has returned."""
    try:
        return copy.deepcopy(state)
    except Exception:  # what cannot be copied cannot be saved either, which is said when a checkpoint asks for it
        return state


_NUM_STATES = 8
"""More than the steps that are read ahead: one to know the last batch, one on its way to the device."""


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
        in_blocks: bool = False,
    ) -> None:
        """With `in_blocks` every rank has grains that follow each other, unless ranks read shards of their own."""
        self._global_batch = global_batch
        self._num_grains = num_grains
        self._collate = collate or stack_collate
        self._seed = seed
        self._device = device or torch.device("cpu")
        self._rank = rank
        self._size = size
        self._clock = clock or Clock()
        self._traits = DatasetTraits(dataset)
        self.is_sharded = self._traits.is_cut_for(size)
        """True if this rank reads a part of its own."""
        self._in_blocks = in_blocks and not self.is_sharded
        self._states: dict[tuple[int, int], Any] = {}
        self._resumed: tuple[tuple[int, int], Any] | None = None

    def state_at(self, epoch: int, step: int) -> Any:
        """Return the state of a `Stateful` stream after the first `step` steps of an epoch; None if it is not known.

        Those of the last few steps are kept: batches are read ahead.
        """
        return self._states.get((epoch, step))

    def resume_with(self, epoch: int, step: int, state: Any) -> None:
        """Go on with a state when `run` is asked for this very place."""
        self._resumed = (epoch, step), state

    def run(self, *, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches from step `start` on; the steps before it are read and passed over, unless the
        stream itself goes on there."""
        batches = self._batches(epoch, start)
        return batches if self._device.type == "cpu" else prefetch(batches, CudaUploads(self._device), self._clock)

    def empty(self, epoch: int, step: int) -> Batch:
        """Return the batch of a rank whose data has ended while another's has not."""
        return Batch(
            epoch, step, self._num_grains, 0, float(self._global_batch), [], has_next=False, knows_others=False
        )

    def _read(self, epoch: int, start: int, per_step: int) -> Iterator[list[Any]]:
        """Yield the samples of each step from `start` on. Random numbers are keyed by the step, since training draws in
        between."""
        owner = self._rank + 1 if self.is_sharded else 0
        seed_everything(key(self._seed, epoch, owner))
        part = self._traits.part(self._rank, self._size)
        if isinstance(part, KnowsEpochs):
            part.set_epoch(epoch)
        source, stateful, first = self._open(part, epoch, start)
        for step in count(first):
            seed_everything(key(self._seed, epoch, owner, step))
            samples = list(islice(source, per_step))
            if not samples:
                return
            if stateful is not None:
                self._states[epoch, step + 1] = _as_it_is_now(stateful.state_dict())
                if len(self._states) > _NUM_STATES:
                    del self._states[next(iter(self._states))]
            if step >= start:
                yield samples

    def _open(self, part: Iterable[Any], epoch: int, start: int) -> tuple[Iterator[Any], Stateful | None, int]:
        """Return an iterator over samples, what knows where it is, and the step that comes next."""
        state = None
        if self._resumed is not None and self._resumed[0] == (epoch, start):
            state, self._resumed = self._resumed[1], None
        if isinstance(part, Stateful) and not _has_buffer(part):
            if state is not None:
                part.load_state_dict(state)
            return iter(part), part, 0 if state is None else start
        source = iter(part)
        if not isinstance(source, Stateful):
            return source, None, 0
        if state is not None:
            source.load_state_dict(state)
        return source, source, 0 if state is None else start

    def _cut(
        self, samples: list[Any], step: int, sizes: Mapping[int, int], own_numbers: range
    ) -> tuple[list[Grain], int]:
        """Return the grains of this rank, and how many of all are not empty."""
        grains = []
        offset = num_filled = 0
        for number, wanted in sizes.items():
            piece = samples[offset : offset + wanted]
            num_filled += bool(piece)
            if piece and number in own_numbers:
                first = (step * self._global_batch) + offset
                ids = np.arange(first, first + len(piece), dtype=np.int64)
                grains.append(Grain(self._collate(piece), number, ids))
            offset += wanted
        return grains, num_filled

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        own_numbers, starts = range(self._rank, self._num_grains, self._size), None
        if self._in_blocks:
            starts = even_starts(self._num_grains, self._size)
            own_numbers = range(starts[self._rank], starts[self._rank + 1])
        sizes = [len(piece) for piece in np.array_split(np.arange(self._global_batch), self._num_grains)]
        read_numbers = own_numbers if self.is_sharded else range(self._num_grains)
        step_sizes = {number: sizes[number] for number in read_numbers}
        source = self._read(epoch, start, sum(step_sizes.values()))
        step = start
        samples = next(source, [])
        while samples:
            following = next(source, [])
            grains, num_filled = self._cut(samples, step, step_sizes, own_numbers)
            # Of a last batch that does not fill all grains, the last ones are empty.
            filled = None if starts is None else tuple(min(start, num_filled) for start in starts)
            num_samples = self._global_batch if self.is_sharded else len(samples)
            yield Batch(
                epoch,
                step,
                # The last batch may not fill all grains: who counts them (batch norm) must not wait for an empty one.
                num_grains=self._num_grains if self.is_sharded else num_filled,
                num_samples=num_samples,
                count=float(num_samples),
                grains=grains,
                is_last=not following and (self._size == 1 or not self.is_sharded),
                has_next=bool(following),
                own_count=float(sum(len(grain.samples) for grain in grains)),
                knows_others=self._size == 1 or not self.is_sharded,
                starts=filled,
            )
            samples = following
            step += 1
