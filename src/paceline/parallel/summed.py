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
from typing import Any, Literal

import torch
import torch.distributed

from paceline.core.errors import PacelineError
from paceline.observe.clock import Clock
from paceline.parallel.step import Tally
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


class _Bucket:
    def __init__(self, members: list[tuple[int, torch.nn.Parameter]], extra: int) -> None:
        first = members[0][1]
        numel = sum(parameter.numel() for _, parameter in members)
        self.flat = torch.zeros(numel + extra, dtype=first.dtype, device=first.device)
        self.members = members
        self.views: list[torch.Tensor] = []
        offset = 0
        for _, parameter in members:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.tail = self.flat[offset:]
        self.pending: set[int] = set()
        self.is_sent = False


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
        extra = TALLY + len(self.parameters)  # the tally, and one mark per parameter that has a gradient
        self._buckets = _fill(self.parameters, bucket_bytes, extra if self._half is None else 0)
        last = self._buckets[-1]
        # Half precision cannot hold a count exactly: the tally is then reduced apart from the gradients.
        self._tally_rides = last.tail.numel() > 0
        self._tally = (
            last.tail if self._tally_rides else torch.zeros(extra, dtype=torch.float32, device=last.flat.device)
        )
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

    def reduce(self, tally: Tally) -> Tally:
        self._armed = False
        for place, number in zip(self._tally_places, tally, strict=True):
            if isinstance(number, torch.Tensor) and number.is_cuda:
                place.copy_(number)
            else:
                place.fill_(float(number))  # an assignment would copy it to a GPU and wait for that
        while self._next < len(self._buckets):
            self._send_next()
        for work in self._works:
            work.wait()
        self._works.clear()
        for flat, half in self._rounded:
            flat.copy_(half)
        self._rounded.clear()
        self._drop_unused()
        if self._clock is not None:
            self._clock.meet()
        return Tally(*self._tally[:TALLY].clone().unbind())

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None

    def _hook(self, bucket: _Bucket, index: int) -> Callable[[torch.Tensor], None]:
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

        return accumulated

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        for (_, parameter), view in zip(bucket.members, bucket.views, strict=True):
            if parameter.grad is not view and parameter.grad is not None:  # replaced by autograd or by the task
                view.copy_(parameter.grad)
                parameter.grad = view
        if self._next == len(self._buckets) - 1:
            self._mark_used()
        bucket.is_sent = True
        flat = bucket.flat
        if self._half is not None and flat.element_size() > self._half.itemsize:
            flat = bucket.flat.to(self._half)
            self._rounded.append((bucket.flat, flat))
        self._send(flat)
        if self._next == len(self._buckets) - 1 and not self._tally_rides:
            self._send(self._tally)
        self._next += 1

    def _mark_used(self) -> None:
        if all(self._has_gradient):
            self._tally[TALLY:] = 1.0
        else:
            self._tally[TALLY:] = torch.tensor(self._has_gradient, device="cpu").to(self._tally, non_blocking=True)

    def _drop_unused(self) -> None:
        """Remove the gradients that no rank had. The host knows this rank's own without waiting for the device."""
        if all(self._has_gradient):
            return
        used = self._tally[TALLY:].tolist()
        for parameter, marks in zip(self.parameters, used, strict=True):
            if not marks:
                parameter.grad = None

    def _send(self, tensor: torch.Tensor) -> None:
        work = self._link.all_reduce(tensor, async_op=True)
        if work is not None:
            self._works.append(work)


def _fill(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, extra: int) -> list[_Bucket]:
    """Cut parameters, last first, into buckets of one dtype; the last bucket has `extra` places at its end."""
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
    exact = groups[-1][0][1].dtype in (torch.float32, torch.float64)
    return [_Bucket(group, extra if exact and number == len(groups) - 1 else 0) for number, group in enumerate(groups)]
