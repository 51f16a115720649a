"""The training data of one stage: from a data set and settings to this rank's batches of any epoch, from any step."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.change_points import value_at
from paceline.config.settings import DataSettings
from paceline.core.errors import PacelineError, RanksDiffer
from paceline.core.together import Exclusion
from paceline.core.units import counted
from paceline.data.dataset import Collate, DatasetTraits, fingerprint
from paceline.data.fetch import Request
from paceline.data.grain import Batch, Grain
from paceline.data.loader import BatchRow, EpochSteps, Loader
from paceline.data.plan import BatchRule, Plan, RankPlan
from paceline.data.stream import Stream
from paceline.observe.clock import Clock
from paceline.train.autotune.shapes import LOOKED_AT, fitted
from paceline.world.link import Link
from paceline.world.values import NotSendable, decode, encode


class NotData(PacelineError):
    """The data of a task can neither be indexed nor iterated over."""

    data: Any
    sentence = "{kind} is no data set"
    hint = "return a torch Dataset (with __len__ and __getitem__), a list, or an iterable"

    @property
    def kind(self) -> str:
        return type(self.data).__name__


class NoData(PacelineError):
    """A data set without a sample."""

    sentence = "the training data is empty"
    hint = "look at what `train_data` (or the stage) returns: a filter that keeps nothing, an empty folder?"


class NothingRead(PacelineError):
    """An epoch of an iterable that has nothing to give, and never will."""

    epoch: int
    sentence = "the training data gave nothing in epoch {number}"
    hint = "return a fresh iterator from `__iter__` each time; a generator can be read only once"

    @property
    def number(self) -> int:
        return self.epoch + 1


class StreamSetting(PacelineError):
    """A setting that needs to know the whole data set, with data of unknown length."""

    setting: str
    value: Any
    excludes = (
        Exclusion(
            "data of unknown length",
            "`--batch-cost`, `--batch-schedule`, `--length-schedule`, `--partition-epoch`, `--drop-last`, `--order` "
            "sorted, laplace or bucket",
            "mathematics",
            "They are made from the number and lengths of all samples, which a stream does not have.",
        ),
    )
    sentence = "`{setting}` is {value!r}, but the data is an iterable of unknown length"
    hint = "leave `{setting}` out, or give a data set with __len__ and __getitem__"


class StreamState(PacelineError):
    """A stream's `state_dict` with something that a checkpoint cannot hold."""

    kind: str
    sentence = "the `state_dict` of the training data holds a {kind}, which cannot be saved"
    hint = "return numbers, text, bytes, lists, dictionaries, tensors and arrays"


class DataChanged(PacelineError):
    """A run is to be resumed on other data than it was trained on."""

    sentence = "the training data is not what it was when the run was saved: samples would be left out or repeated"
    hint = "give it the data that it began with, or add `--allow-change` to go on with the new one"


@dataclass(frozen=True)
class TrainingData:
    """A data set, and how its samples are batched: a task may decide about each of these."""

    dataset: Any
    collate: Collate | None = None
    lengths: NDArray[Any] | None = None
    counts: NDArray[Any] | None = None

    @classmethod
    def of(cls, dataset: Any, collate: Collate | None = None) -> TrainingData:
        """Take lengths and counts from the data set."""
        traits = DatasetTraits(dataset)
        return cls(dataset, collate, traits.lengths, traits.counts)


class Feed:
    """Batches of a data set, map-style (planned) or iterable (as it comes)."""

    def __init__(
        self,
        data: TrainingData,
        config: DataSettings,
        link: Link,
        *,
        grains: int,
        seed: int,
        clock: Clock | None = None,
        in_blocks: bool = False,
        end_epoch: int | None = None,
    ) -> None:
        """Open a data set. `in_blocks`: a rank's grains are consecutive, as sums with one order need it. Workers do not
        read ahead into `end_epoch`."""
        self.data = data.dataset
        self.collate, self.lengths, self._counts = data.collate, data.lengths, data.counts
        self._config, self._link, self._grains, self._seed = config, link, grains, seed
        self._in_blocks = in_blocks
        self._offset = config.dataset_distribution == "random_seed_offset"
        self._plans: dict[int, Plan] = {}
        self._batch_points, self._length_points = config.batch_points, config.length_points
        steps = [point.step for point in (*self._batch_points, *self._length_points)]
        self._change_steps = sorted({step for step in steps if step})
        """Steps of the stage at which a schedule of batches or lengths changes."""
        epochs = [point.epoch for point in (*self._batch_points, *self._length_points)]
        self._change_epochs = sorted({epoch for epoch in epochs if epoch})
        self._begins = [0]
        """Steps of the stage before each of the first epochs; as many as were asked for."""
        self._planning = threading.Lock()
        self._row: BatchRow | None = None
        self._end_epoch = end_epoch
        self.traits = DatasetTraits(self.data)
        self.is_stream = self.traits.is_stream
        """Data of unknown length: the reduction of each step tells if any rank has more."""
        self.fingerprint: str | None = None
        """The same on all ranks; None for data of unknown length."""
        if self.is_stream:
            _check_stream(config)
            self._stream = self._open_stream(clock)
        else:
            self.fingerprint = self._agree_on_fingerprint()
            # Of the first epochs, wherever a run goes on: its shapes stay the same.
            self.collate = fitted(self.collate, map(self.plan, chain(self._change_epochs, range(LOOKED_AT))))
            self._loader = self._open_loader(clock)

    def _open_stream(self, clock: Clock | None) -> Stream:
        world = self._link.world
        return Stream(
            self.data,
            global_batch=self._config.max_samples,
            num_grains=self._grains,
            collate=self.collate,
            seed=self._seed,
            device=self._link.device,
            rank=world.rank,
            size=world.size,
            clock=clock,
            in_blocks=self._in_blocks,
        )

    def _open_loader(self, clock: Clock | None) -> Loader:
        return Loader(
            self.data,
            collate=self.collate,
            seed=self._seed,
            device=self._link.device,
            workers=self._config.workers,
            local_size=self._link.world.local_size,
            clock=clock,
        )

    def _agree_on_fingerprint(self) -> str:
        """Return the data's fingerprint once all ranks have the same: their plans would differ without a word."""
        if not self.traits.is_map_style:
            raise NotData(self.data)
        if len(self.data) == 0:
            raise NoData
        digest = fingerprint(self.data, self.lengths, self._counts)
        check_ranks(self._link.gather_objects((len(self.data), digest)))
        return digest

    def plan(self, epoch: int) -> Plan:
        """Return the order of one epoch; those of two are kept, since workers may be an epoch ahead.

        Threads that read ahead ask for it, too.
        """
        with self._planning:
            if epoch not in self._plans:
                self._plans = {number: plan for number, plan in self._plans.items() if abs(number - epoch) == 1}
                self._plans[epoch] = self._made_plan(epoch)
            return self._plans[epoch]

    def _made_plan(self, epoch: int) -> Plan:
        world, config = self._link.world, self._config
        kind, ranks, stream = (RankPlan, world.size, world.rank + 1) if self._offset else (Plan, 1, 0)
        began = self._began(epoch)
        rule, *changes = [
            (step - began, self._rule(epoch, step, ranks))
            for step in (began, *(step for step in self._change_steps if step > began))
        ]
        return kind(
            len(self.data),
            rule=rule[1],
            changes=changes,
            grains=max(1, self._grains // ranks),
            seed=self._seed,
            epoch=epoch,
            lengths=self.lengths,
            counts=self._counts,
            order=config.order,
            bins=config.bins,
            partition_epoch=config.partition_epoch,
            stream=stream,
            in_blocks=self._in_blocks and not self._offset,
            drop_last=config.drop_last,
        )

    def _rule(self, epoch: int, step: int, ranks: int) -> BatchRule:
        """Return the size of a batch at a step of the stage."""
        config = self._config
        is_by_cost = config.batch_cost is not None
        size = value_at(self._batch_points, config.batch_cost or config.max_samples, epoch, step)
        assert size is not None, "the settings were checked"
        samples = config.max_samples if is_by_cost else int(size)
        return BatchRule(
            max_samples=max(1, samples // ranks),
            max_cost=size / ranks if is_by_cost else None,
            max_length=value_at(self._length_points, None, epoch, step),
        )

    def _began(self, epoch: int) -> int:
        """Return the steps of the stage before an epoch, as far as a schedule has to know them: all later ones are the
        same to it. Epochs before are planned for that."""
        last = self._change_steps[-1] if self._change_steps else 0
        while len(self._begins) <= epoch and self._begins[-1] < last:
            before = len(self._begins) - 1
            plan = self._plans.get(before) or self._made_plan(before)
            self._begins.append(self._begins[-1] + self._limited(plan.num_steps))
        return self._begins[min(epoch, len(self._begins) - 1)]

    def _limited(self, steps: int) -> int:
        limit = self._config.limit_batches
        return steps if limit is None else min(steps, limit)

    def total_steps(self, epochs: int) -> int | None:
        """Return the number of steps of so many epochs; None if unknown. With `random_seed_offset` all ranks must ask.

        Where epochs differ in length (batches by cost), the first one stands for all; with a schedule of batches or
        lengths, the first one after its last change for those that follow.
        """
        if not (self._batch_points or self._length_points):
            each = self.num_steps(0)
            return None if each is None else each * epochs
        last_epoch = max((point.epoch for point in (*self._batch_points, *self._length_points)), default=0)
        last_step = self._change_steps[-1] if self._change_steps else 0
        total = 0
        for epoch in range(epochs):
            steps = self._num_planned_steps(epoch)
            if epoch >= last_epoch and total >= last_step:
                return total + steps * (epochs - epoch)
            total += steps
        return total

    @property
    def is_cut(self) -> bool:
        """True if each rank reads a part of its own of data of unknown length."""
        return self.is_stream and self._stream.is_sharded

    @property
    def workers(self) -> int:
        """Loader processes of this rank; `auto` is known once a batch was read."""
        return 0 if self.is_stream else self._loader.workers or 0

    def num_steps(self, epoch: int) -> int | None:
        """Return the number of steps of an epoch, the same on all ranks; None if unknown.

        With `random_seed_offset` all ranks must ask.
        """
        return self._config.limit_batches if self.is_stream else self._num_planned_steps(epoch)

    def _num_planned_steps(self, epoch: int) -> int:
        steps = self.plan(epoch).num_steps
        if self._offset:  # every rank has its own order and so its own number of batches
            steps = max(self._link.gather_objects(steps))
        return self._limited(steps)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch from a step on. All ranks must ask."""
        return self._streamed(epoch, start) if self.is_stream else self._planned(epoch, start)

    def read(self, picks: Iterable[tuple[int, int]], epoch: int = 0) -> Iterator[Grain]:
        """Yield grains, each by (step, number), of any rank; as an epoch would have them, before it has begun."""
        plan, self._row = self.plan(epoch), None
        return self._loader.read(Request(epoch, number, plan.grains(step)[number]) for step, number in picks)

    def stream_state(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Return where a stream that knows it is after so many steps, for a checkpoint; empty if nobody knows.

        Where ranks read parts of their own, all must call it.
        """
        state = self._stream.state_at(epoch, step) if self.is_stream else None
        if state is None and not (self.is_stream and self._stream.is_sharded):
            return {}
        place = {"epoch": epoch, "step": step, "size": self._link.world.size, "state": state}
        try:
            data = encode(place)
        except NotSendable as error:
            raise StreamState(error.kind) from error
        is_known = state is not None
        everyone = self._link.gather_objects((data, is_known)) if self._stream.is_sharded else [(data, is_known)]
        if not all(known for _, known in everyone):
            return {}
        return {
            str(rank): torch.frombuffer(bytearray(each), dtype=torch.uint8) for rank, (each, _) in enumerate(everyone)
        }

    def resume_stream(self, saved: Mapping[str, Tensor]) -> str | None:
        """Go on where `stream_state` was taken; returns why that is not possible, in words."""
        if not saved or not self.is_stream:
            return None
        world = self._link.world
        places = [decode(bytes(tensor.numpy())) for _, tensor in sorted(saved.items(), key=lambda entry: int(entry[0]))]
        if len(places) > 1 or self._stream.is_sharded:
            if places[0]["size"] != world.size or len(places) != world.size:
                return (
                    f"each rank reads a part of its own of the data, and ranks are not {places[0]['size']} any more: "
                    "in this epoch some samples are trained on again and others are left out"
                )
            place = places[world.rank]
        else:
            place = places[0]
        self._stream.resume_with(place["epoch"], place["step"], place["state"])
        return None

    def close(self) -> None:
        """Stop reading."""
        self._row = None
        if not self.is_stream:
            self._loader.close()

    def _planned(self, epoch: int, start: int) -> Iterator[Batch]:
        steps = self._num_planned_steps(epoch)
        if start >= steps:
            return
        if self._row is None or self._row.position != (epoch, start):  # else workers have read on to here
            self._row = self._loader.row(self._epochs(epoch, range(start, steps)))
        batches = self._row.next_epoch()
        size = self._link.world.size
        if not self._offset or size == 1:
            yield from batches
            return
        # A rank knows only its own plan, but all must divide by the same number; the engine then corrects it to the
        # true count, which comes with the reduction.
        per_pass = len(self.data) if self._counts is None else float(self._counts.sum())
        common = max(1.0, per_pass * size / (steps * self._config.partition_epoch))
        for batch in batches:
            yield replace(batch, count=common)

    def _epochs(self, epoch: int, steps: range) -> Iterator[EpochSteps]:
        """Yield these steps of an epoch and then the epochs that workers may read on into while it is trained on."""
        world = self._link.world
        yield EpochSteps(epoch, self.plan(epoch), steps, world.rank, world.size)
        if self._offset:  # the number of steps of another epoch takes all ranks, which are not at the same place
            return
        while self._end_epoch is None or epoch + 1 < self._end_epoch:
            epoch += 1
            yield EpochSteps(epoch, self.plan(epoch), range(self._num_planned_steps(epoch)), world.rank, world.size)

    def _streamed(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield batches, up to `limit_batches` on all ranks alike.

        Without a limit, where ranks read shards, this has no end on several ranks: empty batches follow a rank's last
        one, until the loop learns from the reduction that no rank has more.
        """
        limit = self._config.limit_batches
        for batch in self._streamed_for_ever(epoch, start):
            if limit is not None and batch.step + 1 >= limit:
                batch = replace(batch, has_next=False, is_last=True)
            yield batch
            if batch.is_last:
                return

    def _streamed_for_ever(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield this rank's batches, and on several ranks empty ones when its data has ended."""
        step = start
        for batch in self._stream.run(epoch=epoch, start=start):
            step = batch.step + 1
            yield batch
        if self._link.world.size > 1:
            for number in count(step):
                yield self._stream.empty(epoch, number)


def check_ranks(everyone: Sequence[tuple[int, str]]) -> None:
    """Raise `RanksDiffer` unless all ranks have the same (size, fingerprint)."""
    if len(set(everyone)) > 1:
        sizes = [size for size, _ in everyone]
        rank = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)
        other = "of the same size, but not the same"
        if rank is not None:
            other = f"{counted(sizes[rank], 'sample')} on rank {rank}"
        raise RanksDiffer(
            f"ranks have different training data: {counted(sizes[0], 'sample')} on rank 0, {other}",
            hint="let all ranks read the same files; a copy on one of the machines may be old or cut short",
        )


def _check_stream(config: DataSettings) -> None:
    if config.batch_cost is not None:
        raise StreamSetting("batch_cost", config.batch_cost)
    if config.drop_last:
        raise StreamSetting("drop_last", config.drop_last)
    for name in ("batch_schedule", "length_schedule"):
        if getattr(config, name):
            raise StreamSetting(name, " ".join(getattr(config, name)))
    if config.partition_epoch != 1:
        raise StreamSetting("partition_epoch", config.partition_epoch)
    if config.order in ("sorted", "laplace", "bucket"):
        raise StreamSetting("order", config.order)
