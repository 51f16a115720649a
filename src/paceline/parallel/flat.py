"""Tensors that are averaged over the ranks as one flat buffer, at once or while training goes on.

    start(weight)    the tensors as they are now are on their way, each rank's with its weight
    finish(total)    wait; the average is applied: copied where nothing has changed since `start`, else as the
                     correction  tensor += average - tensor at start

Numbers that are rounded on the wire, go through an outer optimizer or must not change by rounding (buffers) travel as
differences from the last model that all ranks had (`anchor`). `by_value` they travel as they are: rounded each to its
own size, nothing carried over, so that what is small and positive stays small and positive (second moments).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.outer import Outer
from paceline.parallel.wire import Exchange, Wire
from paceline.world.failure.flight_recorder import trail


class FlatAverage:
    """Tensors of one dtype and device, in the order given."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup,
        *,
        wire: Wire | None = None,
        outer: Outer | None = None,
        by_difference: bool = False,
        by_value: bool = False,
    ) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        first = self.tensors[0]
        length = sum(tensor.numel() for tensor in self.tensors)
        self._group = group
        self._sent = torch.zeros(length, dtype=first.dtype, device=first.device)
        self._sum = torch.zeros_like(self._sent)
        self.outer = outer
        self.exchange = None if wire is None else Exchange(length, wire, group, first.device, carries=not by_value)
        self.anchor: Tensor | None = None
        """The last common model, where numbers travel as differences."""
        if not by_value and (wire is not None or outer is not None or by_difference):
            self.anchor = torch.zeros_like(self._sent)
            self.take_anchor()
        self._work: dist.Work | None = None
        self.is_in_flight = False

    @torch.no_grad()
    def take_anchor(self) -> None:
        """The tensors as they are now are what all ranks have."""
        if self.anchor is not None:
            torch._foreach_copy_(self._views(self.anchor), self.tensors)

    @torch.no_grad()
    def start(self, weight: float) -> None:
        assert not self.is_in_flight, "one average at a time"
        self.is_in_flight = True
        torch._foreach_copy_(self._views(self._sent), self.tensors)
        if self.anchor is None:
            torch.mul(self._sent, weight, out=self._sum)
        else:
            torch.sub(self._sent, self.anchor, out=self._sum)
            self._sum.mul_(weight)
        trail.note("average", self._sum)
        if self.exchange is None:
            self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)
        else:
            self.exchange.start(self._sum)

    def poll(self) -> bool:
        """Go on as far as possible without waiting; whether all has been sent that will be."""
        return self.exchange is None or self.exchange.poll()

    def go_on(self) -> None:
        """Send what is left to send, waiting for what it depends on."""
        if self.exchange is not None:
            self.exchange.go_on()

    def wait(self) -> None:
        """Return when the sum is here."""
        if self.exchange is not None:
            self._sum.copy_(self.exchange.finish())
        elif self._work is not None:
            self._work.wait()
            self._work = None

    @torch.no_grad()
    def finish(self, total: float, has_moved: bool) -> tuple[Tensor, Tensor]:
        """Apply what `wait` brought; (distance of this rank from the average, norm of the average), both squared."""
        self.is_in_flight = False
        average = self._sum
        if total == 0:  # no rank has learned anything since the last time
            return torch.zeros(()), torch.ones(())
        average.div_(total)
        if self.anchor is not None:
            average.add_(self.anchor)
        distance, norm = _square(self._sent - average), _square(average)
        if self.anchor is not None:
            if self.outer is None:
                self.anchor.copy_(average)
            else:
                self.outer.step(self.anchor, average)
            average = self.anchor
        if has_moved:
            torch.sub(average, self._sent, out=self._sum)
            torch._foreach_add_(self.tensors, self._views(self._sum))
        else:
            torch._foreach_copy_(self.tensors, self._views(average))
        return distance, norm

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([tensor.numel() for tensor in self.tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, self.tensors, strict=True)]


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors that can share a flat buffer."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def _square(flat: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
    return norm.double().square()
