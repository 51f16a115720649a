"""Distributed data parallel: gradients summed over the ranks while the backward pass is still running.

Gradients live in flat buckets, filled from the last layer to the first. When the last gradient of a bucket has been
accumulated in the rank's last backward of the step, its all-reduce starts; buckets are sent in the same fixed order
on every rank. Compared with torch's DistributedDataParallel wrapper, on the same `torch.distributed` collectives:

- the model is not wrapped: a loss may call it several times, or any of its methods, and names keep their form;
- a rank with nothing to do sends its zeroed buckets, no forward pass needed; parameters without a gradient need no
  search of the graph: what has not been sent when backward ends is sent then, and a parameter that no rank had a
  gradient for has none afterwards, as on one rank;
- sums, not means: losses are already divided by the global count;
- the step's loss, count and flags travel at the end of the last bucket: a step has no other collective;
- in half precision (`wire`), as torch's compression hooks do it, which on CPU know fp16 only;
- a backward that is replayed from a CUDA graph adds to the buckets, too: on a stream of its own each all-reduce waits
  for the bucket's mark in the graph, beside the rest of the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed

from paceline.core.errors import PacelineError
from paceline.observe.clock import Clock
from paceline.parallel.step import RankNumbers, Sums, Tally
from paceline.parallel.strategy import GlobalBatch, Mark, Strategy
from paceline.parallel.wire import half_of
from paceline.world.link import Link

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first all-reduce starts early
BUCKET_BYTES = 25 << 20
TALLY = len(Tally._fields)


class PiecewiseGradient(PacelineError):
    """A gradient grew after it was complete and had been sent."""

    sentence = "a parameter got its gradient in several pieces in one backward (reentrant checkpointing?)"
    hint = "use torch.utils.checkpoint with use_reentrant=False, or `checkpoint_activations`"


class Bucket:
    """Gradients of some parameters in one piece of memory, with room for other numbers at its end (`tail`)."""

    def __init__(
        self, members: list[tuple[int, torch.nn.Parameter]], extra: int, *, align: int = 1, multiple_of: int = 1
    ) -> None:
        """Gradients begin at multiples of `align` numbers; the length is a `multiple_of`.

        With `align` they are also laid out as their parameters are, as autograd does it by itself.
        """
        first = members[0][1]
        starts = list(accumulate((_up(member.numel(), align) for _, member in members), initial=0))
        length = _up(starts[-1] + extra, multiple_of)
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.members = members
        self.views = [
            self.flat[start : start + member.numel()].view_as(member)
            if align == 1 or not _is_dense(member)
            else self.flat.as_strided(member.shape, member.stride(), start)
            for start, (_, member) in zip(starts[:-1], members, strict=True)
        ]
        self.tail_at = slice(starts[-1], starts[-1] + extra)
        self.tail = self.flat[self.tail_at]
        self.pending: set[int] = set()
        self.is_sent = False

    def collect(self) -> None:
        """Take over gradients that autograd or the task has put elsewhere."""
        for (_, parameter), view in zip(self.members, self.views, strict=True):
            if parameter.grad is not view and parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view


def _up(length: int, multiple_of: int) -> int:
    return -(-length // multiple_of) * multiple_of


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has no gaps and does not overlap itself."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class Summed(Strategy):
    """`reduce: grad` on several ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        link: Link,
        bucket_bytes: int = BUCKET_BYTES,
        wire: Literal["full", "fp16", "bf16", "int8"] = "full",
        clock: Clock | None = None,
    ) -> None:
        """`wire` is the format in which gradients are sent and added; `clock` is told when the ranks have met."""
        super().__init__(parameters)
        self._link, self._clock = link, clock
        self._half = half_of(wire)
        self._rounded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buckets = self._make_buckets(bucket_bytes)
        last = self._buckets[-1]
        # Half precision cannot hold a count exactly: the tally is then reduced apart from the gradients.
        self._tally_rides = last.tail.numel() > 0
        self._tally = last.tail if self._tally_rides else self._make_tally(last.flat.device)
        self._tally_places = self._tally[:TALLY].unbind()
        self._has_gradient = [False] * len(self.parameters)
        self._armed = False
        self._next = 0
        self._stream = torch.cuda.Stream(link.device) if link.device.type == "cuda" else None
        """Stream from which buckets are sent while a recorded backward is replayed."""
        self._works: list[torch.distributed.Work] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))
            for bucket in self._buckets
            for index, parameter in bucket.members
        ]

    def _make_buckets(self, bucket_bytes: int) -> list[Bucket]:
        groups = grouped(self.parameters, bucket_bytes)
        last = groups[-1][0][1].dtype
        rides = self._half is None and last in (torch.float32, torch.float64)
        return [
            Bucket(group, self._num_extra if rides and number == len(groups) - 1 else 0)
            for number, group in enumerate(groups)
        ]

    def _make_tally(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self._num_extra, dtype=torch.float32, device=device)

    @property
    def _num_extra(self) -> int:
        """The tally, and one mark per parameter that has a gradient."""
        return TALLY + len(self.parameters)

    def begin(self, batch: GlobalBatch) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.pending = {index for index, _ in bucket.members}
            bucket.is_sent = False
            for (_, parameter), view in zip(bucket.members, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
        self._has_gradient = [False] * len(self.parameters)
        self._next = 0

    def last_backward(self) -> None:
        self._armed = True

    def gradient_groups(self) -> Sequence[Mapping[torch.Tensor, torch.Tensor]]:
        return [
            {parameter: view for (_, parameter), view in zip(bucket.members, bucket.views, strict=True)}
            for bucket in self._buckets
        ]

    def replayed(self, used: Collection[torch.Tensor], marks: Sequence[Mark | None]) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter in used:
                self._has_gradient[index] = True
        if not self._armed:
            return
        with self._beside():
            while self._next < len(self._buckets) - 1 and (mark := marks[self._next]) is not None:
                mark.wait()
                self._send_next()

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def reduce(self, numbers: RankNumbers) -> Sums:
        self._armed = False
        self._enter(numbers)
        while self._next < len(self._buckets):
            self._send_next()
        self._wait()
        self._drop_unused()
        if self._clock is not None:
            self._clock.meet()
        return Sums(Tally(*self._tally[:TALLY].clone().unbind()))

    def _enter(self, numbers: RankNumbers) -> None:
        """Put this rank's numbers where they are sent from."""
        for place, number in zip(self._tally_places, numbers.in_turn(), strict=True):
            put(place, number)

    def _wait(self) -> None:
        """Wait for everything that was sent."""
        for work in self._works:
            work.wait()
        self._works.clear()
        for flat, half in self._rounded:
            flat.copy_(half)
        self._rounded.clear()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            self._has_gradient[index] = True
            if not self._armed:
                return
            if bucket.is_sent:
                raise PiecewiseGradient
            bucket.pending.discard(index)
            # The last bucket carries the marks of all parameters and waits for the end of backward.
            while self._next < len(self._buckets) - 1 and not self._buckets[self._next].pending:
                self._send_next()
            self._poll()

        return accumulated

    def _poll(self) -> None:
        """Let what is under way go on; called now and then in backward."""

    def _send_next(self) -> None:
        bucket, is_last = self._buckets[self._next], self._next == len(self._buckets) - 1
        bucket.collect()
        if is_last:
            self._mark_used()
        bucket.is_sent = True
        self._send(self._next)
        if is_last and not self._tally_rides:
            self._send_tally()
        self._next += 1

    def _send(self, number: int) -> None:
        flat = self._buckets[number].flat
        if self._half is not None and flat.element_size() > self._half.itemsize:
            flat = flat.to(self._half)
            self._rounded.append((self._buckets[number].flat, flat))
        self._all_reduce(flat)

    def _send_tally(self) -> None:
        self._all_reduce(self._tally)

    def _mark_used(self) -> None:
        if all(self._has_gradient):
            self._marks.fill_(1.0)
        else:
            self._marks.copy_(torch.tensor(self._has_gradient, device="cpu"), non_blocking=True)

    @property
    def _marks(self) -> torch.Tensor:
        return self._tally[TALLY : TALLY + len(self.parameters)]

    def _drop_unused(self) -> None:
        """Remove the gradients that no rank had. The host knows this rank's own without waiting for the device."""
        if all(self._has_gradient):
            return
        for parameter, marks in zip(self.parameters, self._marks.tolist(), strict=True):
            if not marks:
                parameter.grad = None

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        work = self._link.all_reduce(tensor, async_op=True)
        if work is not None:
            self._works.append(work)


def put(place: torch.Tensor, number: Any) -> None:
    """Write a number to a place on the device, which nobody waits for."""
    if isinstance(number, torch.Tensor) and number.is_cuda:
        place.copy_(number)
    else:
        place.fill_(float(number))  # an assignment would copy it to a GPU and wait for that


def grouped(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[list[tuple[int, torch.nn.Parameter]]]:
    """Cut parameters, last first, into groups of one dtype, each with its number."""
    groups: list[list[tuple[int, torch.nn.Parameter]]] = []
    open_groups: dict[torch.dtype, list[tuple[int, torch.nn.Parameter]]] = {}
    for index, parameter in reversed(list(enumerate(parameters))):
        group = open_groups.get(parameter.dtype)
        is_first = len(groups) == 1
        limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if is_first else bucket_bytes
        if group is None or sum(member.nbytes for _, member in group) >= limit:
            group = open_groups[parameter.dtype] = []
            groups.append(group)
        group.append((index, parameter))
    return groups
