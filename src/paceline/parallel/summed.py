"""Distributed data parallel: gradients are summed over the ranks during backward (`reduce: grad`).

Gradients live in flat buckets, filled from the last layer to the first. When the last gradient of a bucket has been
accumulated in the rank's last backward of the step, its sum over the ranks starts; buckets are sent in the same fixed
order on every rank. How buckets are added is the job of an `Adder`:

- `TreeAdd` (`tree/add.py`, `sums: exact`, the default) adds grains in the order of a fixed tree, on this rank and over
  the ranks, so that the sum has the same bits on any number of ranks;
- `FastAdd` (below, `sums: fast` or a compressed `wire`) accumulates grains as they come and calls all-reduce.

Compared with torch's DistributedDataParallel wrapper, on the same `torch.distributed` collectives:

- the model is not wrapped: a loss may call it several times, or call any of its methods, and names keep their form;
- a rank without grains sends its zeroed buckets and needs no forward pass; unused parameters need no search of the
  graph: buckets that are not complete when backward ends are sent then, and a parameter for which no rank had a
  gradient has none afterwards, as on one rank;
- sums, not means: losses are already divided by the global count;
- loss, count and flags of the step are sent at the end of the last bucket: a step has no other collective;
- a backward that is replayed from a CUDA graph adds to the buckets, too: on a separate stream the sum of each bucket
  waits for the bucket's mark in the graph, in parallel with the rest of the replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import TaskContract
from paceline.observe.clock import Clock
from paceline.parallel.step import NUM_TALLY, RankNumbers, Sums, Tally, write
from paceline.parallel.strategy import GlobalBatch, Mark, Strategy
from paceline.parallel.wire import half_of
from paceline.world.link import Link

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first sum starts early
BUCKET_BYTES = 25 << 20

Group = list[tuple[int, torch.nn.Parameter]]
"""Parameters of a bucket, each with its index in the model."""


class Adder(ABC):
    """Addition of buckets: over the grains of a rank and over the ranks. Methods are listed in the order of a step."""

    layout: BucketLayout
    order_s = 0.0
    """Host seconds that a fixed order has cost so far, compared with a sum in any order."""

    def begin(self, batch: GlobalBatch, buckets: Buckets) -> None:  # noqa: B027
        """Begin a step; the buckets are zero."""

    def end_grain(self, buckets: Buckets) -> None:  # noqa: B027
        """Handle the end of a grain's backward: its gradients are in the buckets."""

    def poll(self) -> None:  # noqa: B027
        """Advance sums in flight without waiting; called after each gradient of the last backward."""

    @abstractmethod
    def enter(self, numbers: RankNumbers, buckets: Buckets) -> None:
        """Write this rank's numbers to the tally, before the last bucket is sent."""

    @abstractmethod
    def start(self, index: int, buckets: Buckets) -> None:
        """Start the sum of a bucket over the ranks."""

    @abstractmethod
    def start_tally(self, buckets: Buckets) -> None:
        """Start the sum of a tally that is not part of the last bucket."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all sums."""


class Summed(Strategy):
    """`reduce: grad` on several ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        link: Link,
        adder: Adder,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """`clock` is notified when the ranks have met."""
        super().__init__(parameters)
        self._adder, self._clock = adder, clock
        self._buckets = Buckets(self.parameters, adder.layout, bucket_bytes)
        self._has_gradient = [False] * len(self.parameters)
        self._is_last_backward = False
        self._next = 0
        """Index of the next bucket to send."""
        self._last = len(self._buckets.all) - 1
        self._stream = torch.cuda.Stream(link.device) if link.device.type == "cuda" else None
        """Stream from which buckets are sent while a recorded backward is replayed."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))
            for bucket in self._buckets.all
            for index, parameter in bucket.members
        ]

    @property
    def order_s(self) -> float:
        return self._adder.order_s

    def begin(self, batch: GlobalBatch) -> None:
        for bucket in self._buckets.all:
            bucket.reset()
        self._has_gradient = [False] * len(self.parameters)
        self._next = 0
        self._adder.begin(batch, self._buckets)

    def last_backward(self) -> None:
        self._is_last_backward = True

    def _hook(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        """Return the function that autograd calls after it has accumulated the gradient of a parameter."""
        poll = self._adder.poll

        def accumulated(_: Tensor) -> None:
            self._has_gradient[index] = True
            if not self._is_last_backward:
                return
            if bucket.is_sent:
                raise TaskContract(
                    "a parameter got its gradient in several pieces in one backward (reentrant checkpointing?)",
                    hint="use torch.utils.checkpoint with use_reentrant=False, or `checkpoint_activations`",
                )
            bucket.pending.discard(index)
            # The last bucket carries the marks of all parameters and waits for the end of backward.
            while self._next < self._last and not self._buckets.all[self._next].pending:
                self._send_next()
            poll()

        return accumulated

    def gradient_groups(self) -> Sequence[Mapping[Tensor, Tensor]]:
        return [
            {parameter: view for (_, parameter), view in zip(bucket.members, bucket.views, strict=True)}
            for bucket in self._buckets.all
        ]

    def replayed(self, used: Collection[Tensor], marks: Sequence[Mark | None]) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter in used:
                self._has_gradient[index] = True
        if not self._is_last_backward:
            return
        with self._sending_stream():
            while self._next < self._last and (mark := marks[self._next]) is not None:
                mark.wait()
                self._send_next()

    def _sending_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def end_grain(self) -> None:
        self._adder.end_grain(self._buckets)

    def reduce(self, numbers: RankNumbers) -> Sums:
        self._is_last_backward = False
        buckets = self._buckets
        self._adder.enter(numbers, buckets)
        while self._next <= self._last:
            self._send_next()
        self._adder.finish()
        self._drop_unused()
        if self._clock is not None:
            self._clock.meet()
        statistics = buckets.statistics.clone() if len(buckets.statistics) else None
        return Sums(Tally(*buckets.tally[:NUM_TALLY].clone().unbind()), statistics)

    def _send_next(self) -> None:
        bucket, is_last = self._buckets.all[self._next], self._next == self._last
        bucket.collect()
        if is_last:
            self._mark_used()
        bucket.is_sent = True
        self._adder.start(self._next, self._buckets)
        if is_last and not self._buckets.tally_rides:
            self._adder.start_tally(self._buckets)
        self._next += 1

    def _mark_used(self) -> None:
        if all(self._has_gradient):
            self._buckets.marks.fill_(1.0)
        else:
            self._buckets.marks.copy_(torch.tensor(self._has_gradient, device="cpu"), non_blocking=True)

    def _drop_unused(self) -> None:
        """Remove the gradients that no rank had; a rank that had all of them need not read the device."""
        if all(self._has_gradient):
            return
        for parameter, num_ranks in zip(self.parameters, self._buckets.marks.tolist(), strict=True):
            if not num_ranks:
                parameter.grad = None

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None


class FastAdd(Adder):
    """Sums in the fastest order: grains accumulate in the buckets, and all-reduce adds the ranks.

    With `wire` buckets are rounded to half precision and added in it, as torch's compression hooks do, which support
    only fp16 on CPU. Half precision cannot represent every count: the tally is then a tensor of its own.
    """

    def __init__(self, link: Link, wire: Literal["full", "fp16", "bf16", "int8"] = "full") -> None:
        """`wire` is the format in which gradients are sent and added."""
        self._link, self._half = link, half_of(wire)
        self.layout = BucketLayout(rides_on=() if self._half is not None else (torch.float32, torch.float64))
        self._works: list[dist.Work] = []
        self._rounded: list[tuple[Tensor, Tensor]] = []
        """(bucket, what was sent instead of it)"""

    def enter(self, numbers: RankNumbers, buckets: Buckets) -> None:
        for slot, number in zip(buckets.tally_slots, numbers.in_turn(), strict=True):
            write(slot, number)

    def start(self, index: int, buckets: Buckets) -> None:
        flat = buckets.all[index].flat
        if self._half is not None and flat.element_size() > self._half.itemsize:
            flat = flat.to(self._half)
            self._rounded.append((buckets.all[index].flat, flat))
        self._all_reduce(flat)

    def start_tally(self, buckets: Buckets) -> None:
        self._all_reduce(buckets.tally)

    def _all_reduce(self, tensor: Tensor) -> None:
        work = self._link.all_reduce(tensor, async_op=True)
        if work is not None:
            self._works.append(work)

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        for flat, half in self._rounded:
            flat.copy_(half)
        self._rounded.clear()


@dataclass(frozen=True)
class BucketLayout:
    """Memory layout of buckets that an `Adder` requires."""

    align: int = 1
    """Gradients begin at multiples of this number of elements."""
    multiple_of: int = 1
    """The length of every bucket is a multiple of this."""
    rides_on: tuple[torch.dtype, ...] = ()
    """Dtypes of a last bucket that the tally can be part of."""
    tally_dtype: torch.dtype = torch.float32
    """Dtype of a tally that is a tensor of its own."""
    num_statistics: int = 0
    """Length of a grain's contribution to batch-norm statistics."""


class Buckets:
    """All gradients in flat buckets, followed by the tally: numbers of the step, marks of parameters, statistics."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: BucketLayout, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        groups = grouped(parameters, bucket_bytes)
        num_extra = NUM_TALLY + len(parameters) + layout.num_statistics
        self.tally_rides = groups[-1][0][1].dtype in layout.rides_on
        """True if the tally is at the end of the last bucket."""
        tails = [0] * (len(groups) - 1) + [num_extra if self.tally_rides else 0]
        self.all = [Bucket(group, tail, layout) for group, tail in zip(groups, tails, strict=True)]
        last = self.all[-1]
        self.tally = last.tail
        if not self.tally_rides:
            length = _round_up(num_extra, layout.multiple_of)
            self.tally = torch.zeros(length, dtype=layout.tally_dtype, device=last.flat.device)
        self.tally_slots = self.tally[:NUM_TALLY].unbind()
        self.marks = self.tally[NUM_TALLY : NUM_TALLY + len(parameters)]
        """1 for each parameter that has a gradient; the number of ranks that have it, after the sum."""
        self.statistics_at = slice(NUM_TALLY + len(parameters), num_extra)
        self.statistics = self.tally[self.statistics_at]


class Bucket:
    """Gradients of a group of parameters in one flat tensor, with a `tail` for other numbers."""

    def __init__(self, members: Group, num_tail: int, layout: BucketLayout) -> None:
        """With `align` gradients also have the strides of their parameters, as autograd allocates them."""
        first = members[0][1]
        starts = list(accumulate((_round_up(member.numel(), layout.align) for _, member in members), initial=0))
        length = _round_up(starts[-1] + num_tail, layout.multiple_of)
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.members = members
        self.views = [
            self.flat[start : start + member.numel()].view_as(member)
            if layout.align == 1 or not _is_dense(member)
            else self.flat.as_strided(member.shape, member.stride(), start)
            for start, (_, member) in zip(starts[:-1], members, strict=True)
        ]
        self.tail_at = slice(starts[-1], starts[-1] + num_tail)
        self.tail = self.flat[self.tail_at]
        self.pending: set[int] = set()
        """Parameters whose gradient is not complete."""
        self.is_sent = False

    def reset(self) -> None:
        """Zero the bucket and make its views the gradients of the parameters."""
        self.flat.zero_()
        self.pending = {index for index, _ in self.members}
        self.is_sent = False
        for (_, parameter), view in zip(self.members, self.views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def collect(self) -> None:
        """Copy gradients that autograd or the task has put elsewhere."""
        for (_, parameter), view in zip(self.members, self.views, strict=True):
            if parameter.grad is not view and parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view


def grouped(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[Group]:
    """Divide parameters, last first, into groups of one dtype, each parameter with its index."""
    groups: list[Group] = []
    open_groups: dict[torch.dtype, Group] = {}
    for index, parameter in reversed(list(enumerate(parameters))):
        group = open_groups.get(parameter.dtype)
        is_first = len(groups) == 1
        limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if is_first else bucket_bytes
        if group is None or sum(member.nbytes for _, member in group) >= limit:
            group = open_groups[parameter.dtype] = []
            groups.append(group)
        group.append((index, parameter))
    return groups


def _round_up(length: int, multiple_of: int) -> int:
    return -(-length // multiple_of) * multiple_of


def _is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor has no gaps and does not overlap itself."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
