"""The training data of one stage: from a data set and settings to this rank's batches of any epoch, from any step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from paceline.config.settings import DataSettings
from paceline.core.errors import PacelineError
from paceline.data.ahead import Seat, Turn
from paceline.data.fetch import Request
from paceline.data.grain import Batch, Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule, Plan
from paceline.data.stream import Stream
from paceline.observe.clock import Clock
from paceline.train.fingerprint import check_ranks, fingerprint
from paceline.world.link import Link


class NotData(PacelineError):
    """What a task gave as data can neither be indexed nor iterated over."""

    hint = "return a torch Dataset (with __len__ and __getitem__), a list, or an iterable"

    def __init__(self, data: Any) -> None:
        super().__init__(f"{type(data).__name__} is no data set")


class NoData(PacelineError):
    """A data set without a sample."""

    hint = "look at what `train_data` (or the stage) returns: a filter that keeps nothing, an empty folder?"

    def __init__(self) -> None:
        super().__init__("the training data is empty")


class NothingRead(PacelineError):
    """An epoch of an iterable that has nothing to give, and never will."""

    hint = "return a fresh iterator from `__iter__` each time; a generator can be read only once"

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the training data gave nothing in epoch {epoch + 1}")
        self.epoch = epoch


class StreamSetting(PacelineError):
    """A setting that needs to know the whole data set, with data of unknown length."""

    def __init__(self, setting: str, value: Any) -> None:
        super().__init__(f"`{setting}` is {value!r}, but the data is an iterable of unknown length")
        self.hint = f"leave `{setting}` out, or give a data set with __len__ and __getitem__"


class Feed:
    """Batches of a data set, map-style (planned) or iterable (as it comes)."""

    def __init__(
        self,
        data: Any,
        config: DataSettings,
        link: Link,
        *,
        grains: int,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
        lengths: NDArray[Any] | None = None,
        counts: NDArray[Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.data = data
        self.lengths = lengths
        self.collate = collate
        self.fingerprint: str | None = None
        """The same on all ranks; None for data of unknown length."""
        self._config = config
        self._link = link
        self._grains = grains
        self._seed = seed
        self._offset = config.dataset_distribution == "random_seed_offset"
        self._plans: dict[int, Plan] = {}
        self.end_epoch: int | None = None
        """No epoch from this one on is wanted: workers do not read on into it."""
        self._stream: Stream | None = None
        self.is_stream = isinstance(data, IterableDataset) or (
            hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
        )
        """Unknown length: whether there is more is learned from the step's own reduction."""
        world = link.world
        if self.is_stream:
            self._check_stream()
            self._stream = Stream(
                data,
                global_batch=config.max_samples,
                num_grains=grains,
                collate=collate,
                seed=self._seed,
                device=link.device,
                rank=world.rank,
                size=world.size,
                clock=clock,
            )
            return
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise NotData(data)
        if len(data) == 0:
            raise NoData
        self._counts = counts
        self.fingerprint = fingerprint(data, lengths, counts)
        check_ranks(link.gather_objects((len(data), self.fingerprint)))
        self._loader = Loader(
            data,
            collate=collate,
            seed=self._seed,
            device=link.device,
            workers=config.workers,
            local_size=world.local_size,
            clock=clock,
        )

    def plan(self, epoch: int) -> Plan:
        """The order of one epoch; those of two are kept, since workers may be an epoch ahead."""
        if epoch not in self._plans:
            ranks = self._link.world.size if self._offset else 1
            config = self._config
            self._plans = {number: kept for number, kept in self._plans.items() if abs(number - epoch) == 1}
            self._plans[epoch] = Plan(
                len(self.data),
                rule=BatchRule(
                    max_samples=max(1, config.max_samples // ranks),
                    max_cost=None if config.batch_cost is None else config.batch_cost / ranks,
                ),
                grains=max(1, self._grains // ranks),
                seed=self._seed,
                epoch=epoch,
                lengths=self.lengths,
                counts=self._counts,
                order=config.order,
                bins=config.bins,
                partition_epoch=config.partition_epoch,
                stream=self._link.world.rank + 1 if self._offset else 0,
            )
        return self._plans[epoch]

    @property
    def workers(self) -> int:
        """Loader processes of this rank; `auto` is known once a batch was read."""
        return 0 if self._stream is not None else self._loader.workers or 0

    def num_steps(self, epoch: int) -> int | None:
        """Steps of an epoch, the same on all ranks; None if unknown. With `random_seed_offset` all ranks must ask."""
        if self._stream is not None:
            return self._config.limit_batches
        steps = self.plan(epoch).num_steps
        if self._offset:  # every rank has its own order and so its own number of batches
            steps = max(self._link.gather_objects(steps))
        return steps if self._config.limit_batches is None else min(steps, self._config.limit_batches)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        if self._stream is not None:
            yield from self._stream_batches(epoch, start)
            return
        world = self._link.world
        seat = Seat(plan=world.rank, plans=world.size) if self._offset else Seat(world.rank, world.size)
        steps = self.num_steps(epoch)
        assert steps is not None
        then = None if self._offset else self._next_turn
        batches = self._loader.run(self.plan(epoch), range(start, steps), epoch=epoch, seat=seat, then=then)
        if not self._offset or world.size == 1:
            yield from batches
            return
        # A rank knows only its own plan, but all must divide by the same number; the engine then mends it to the
        # true count, which comes with the reduction.
        per_pass = len(self.data) if self._counts is None else float(self._counts.sum())
        common = max(1.0, per_pass * world.size / (steps * self._config.partition_epoch))
        for batch in batches:
            batch.count = common
            yield batch

    def _next_turn(self, turn: Turn) -> Turn | None:
        """The next epoch, which workers may read on into while this one is trained on. It must need no other rank."""
        epoch = turn.epoch + 1
        if self.end_epoch is not None and epoch >= self.end_epoch:
            return None
        steps = self.num_steps(epoch)
        assert steps is not None
        return Turn(self.plan(epoch), range(steps), epoch, turn.seat)

    def read(self, picks: Iterable[tuple[int, int]], epoch: int = 0) -> Iterator[Grain]:
        """Grains, each by (step, number), of any rank; as an epoch would have them, before it has begun."""
        plan = self.plan(epoch)
        return self._loader.read(Request(epoch, number, plan.grains(step)[number]) for step, number in picks)

    def close(self) -> None:
        if self._stream is None:
            self._loader.close()

    def _stream_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Never ends by itself on several ranks: the loop stops when the reduction says that no rank has more."""
        assert self._stream is not None
        step = start - 1
        for batch in self._stream.run(epoch=epoch, start=start):
            step = batch.step
            limit = self._config.limit_batches
            if limit is not None and step + 1 >= limit:
                batch.has_next, batch.is_last = False, True
            yield batch
            if batch.is_last:
                return
        while self._link.world.size > 1:
            step += 1
            yield self._stream.empty(epoch, step)

    def _check_stream(self) -> None:
        config = self._config
        if config.batch_cost is not None:
            raise StreamSetting("batch_cost", config.batch_cost)
        if config.partition_epoch != 1:
            raise StreamSetting("partition_epoch", config.partition_epoch)
        if config.order in ("sorted", "laplace", "bucket"):
            raise StreamSetting("order", config.order)
