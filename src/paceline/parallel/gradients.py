"""Distributed data parallel: gradients summed over the ranks while the backward pass is still running.

Gradients live in flat buckets, filled from the last layer to the first. When the last gradient of a bucket has been
accumulated in the rank's last backward of the step, its all-reduce starts; buckets are sent in the same fixed order
on every rank. Compared with torch's DistributedDataParallel wrapper, on the same `torch.distributed` collectives:

- the model is not wrapped: a loss may call it several times, or any of its methods, and names keep their form;
- a rank with nothing to do sends its zeroed buckets, no forward pass needed; parameters without a gradient need no
  search of the graph: what has not been sent when backward ends is sent then;
- sums, not means: losses are already divided by the global count;
- the step's loss, count and flags travel at the end of the last bucket: a step has no other collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed

from paceline.parallel.strategy import TALLY, Strategy, Tally
from paceline.world.link import Link

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first all-reduce starts early
BUCKET_BYTES = 25 << 20


class _Bucket:
    def __init__(self, parameters: list[torch.nn.Parameter], extra: int) -> None:
        numel = sum(parameter.numel() for parameter in parameters)
        first = parameters[0]
        self.flat = torch.zeros(numel + extra, dtype=first.dtype, device=first.device)
        self.parameters = parameters
        self.views: list[torch.Tensor] = []
        offset = 0
        for parameter in parameters:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.tail = self.flat[offset:]
        self.pending = 0


class SummedGradients(Strategy):
    """`reduce: grad` on several ranks."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], link: Link, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(parameters)
        self._link = link
        self._buckets = _fill(self.parameters, bucket_bytes)
        last = self._buckets[-1]
        # Half-precision buckets cannot carry a count exactly: the tally then has an all-reduce of its own.
        self._tally_rides = last.tail.numel() > 0
        self._tally = last.tail if self._tally_rides else torch.zeros(TALLY, device=last.flat.device)
        self._armed = False
        self._next = 0
        self._works: list[torch.distributed.Work] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def start_step(self) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.pending = len(bucket.parameters)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
        self._next = 0

    def arm(self, tally: Tally) -> None:
        for index, number in enumerate(tally):
            self._tally[index] = number
        if not self._tally_rides:
            self._send(self._tally)
        self._armed = True

    def reduce(self) -> torch.Tensor:
        self._armed = False
        while self._next < len(self._buckets):
            self._send_next()
        for work in self._works:
            work.wait()
        self._works.clear()
        return self._tally.clone()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None

    def _hook(self, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            if not self._armed:
                return
            bucket.pending -= 1
            if bucket.pending == 0:
                while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
                    self._send_next()

        return accumulated

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not view and parameter.grad is not None:  # replaced by autograd or by the task
                view.copy_(parameter.grad)
                parameter.grad = view
        self._send(bucket.flat)
        self._next += 1

    def _send(self, tensor: torch.Tensor) -> None:
        work = self._link.all_reduce(tensor, async_op=True)
        if work is not None:
            self._works.append(work)


def _fill(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Cut parameters, last first, into buckets of one dtype; the last bucket has room for the tally."""
    groups: list[list[torch.nn.Parameter]] = []
    size = 0
    limit = first_limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in reversed(parameters):
        if not groups or parameter.dtype != groups[-1][0].dtype or size >= limit:
            limit = first_limit if not groups else bucket_bytes
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    exact = groups[-1][0].dtype in (torch.float32, torch.float64)
    return [_Bucket(group, TALLY if exact and index == len(groups) - 1 else 0) for index, group in enumerate(groups)]
