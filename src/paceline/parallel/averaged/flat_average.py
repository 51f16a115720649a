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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.settings import ReduceSettings
from paceline.core.torch_private import foreach_add_, foreach_copy_, foreach_maximum_, foreach_zero_, takes_amp_scaling
from paceline.parallel import wire
from paceline.parallel.averaged.outer_optimizer import Outer
from paceline.parallel.wire import Exchange, Wire
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link


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
        """Take the tensors as they are now for the model that all ranks have."""
        if self.anchor is not None:
            foreach_copy_(self._views(self.anchor), self.tensors)

    @torch.no_grad()
    def start(self, weight: float) -> None:
        assert not self.is_in_flight, "one average at a time"
        self.is_in_flight = True
        foreach_copy_(self._views(self._sent), self.tensors)
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
        """Go on as far as possible without waiting; return True if everything has been sent."""
        return self.exchange is None or self.exchange.poll()

    def go_on(self) -> None:
        """Send what is left to send, waiting for what it depends on."""
        if self.exchange is not None:
            self.exchange.go_on()

    def wait(self) -> None:
        """Wait for the sum."""
        if self.exchange is not None:
            self._sum.copy_(self.exchange.finish())
        elif self._work is not None:
            self._work.wait()
            self._work = None

    @torch.no_grad()
    def finish(self, total: float, has_moved: bool) -> tuple[Tensor, Tensor]:
        """Apply the sum; return (distance of this rank from the average, norm of the average), both squared."""
        self.is_in_flight = False
        average = self._sum
        if total == 0:  # no rank has learned anything since the last time
            return torch.zeros((), dtype=torch.float64, device="cpu"), torch.ones((), dtype=torch.float64, device="cpu")
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
            foreach_add_(self.tensors, self._views(self._sum))
        else:
            foreach_copy_(self.tensors, self._views(average))
        return distance, norm

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([tensor.numel() for tensor in self.tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, self.tensors, strict=True)]


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return groups of tensors that can share a flat buffer."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _square(flat: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
    return norm.double().square()


STEP = "step"
FROM_ZERO = {"step", "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "exp_inf"}
"""Entries that are 0 before the first step, in torch's optimizers and ours."""
NEVER_NEGATIVE = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf"}
"""Entries whose root divides a step: a late correction must not take them to 0, so it takes half of one at most."""

Place = tuple[int, str, tuple[int, ...], str]
"""(parameter, entry, shape, dtype)"""


class StateAverage:
    """Average of an optimizer's state: of its floating-point entries, and of counts of steps to the nearest integer.

    Which entries there are is agreed once: a rank that has none yet for a parameter (it had no gradient) gets zeros.
    Where weights are rounded on the wire, to whatever format, the state travels in bf16 and by value: second moments
    are of all sizes side by side, and one that is rounded to 0 makes an endless step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, link: Link, group: dist.ProcessGroup, settings: ReduceSettings
    ) -> None:
        self._optimizer, self._link, self._group = optimizer, link, group
        self._wire = wire.build("full" if settings.wire == "full" else "bf16")
        self._parameters = [parameter for entry in optimizer.param_groups for parameter in entry["params"]]
        self._places: list[list[Place]] = []
        self._step_places: list[Place] = []
        self._agreed: set[Place] | None = None
        self._should_agree = True
        self.pieces: list[FlatAverage] = []

    def bind(self) -> None:
        """Find the tensors of the state, which an optimizer may have replaced; all ranks must call it."""
        if self._should_agree:
            self.agree()
        for piece, places in zip(self.pieces, self._places, strict=True):
            piece.tensors = [self._tensor(place).detach() for place in places]

    def agree(self) -> None:
        """Agree on the entries that any rank has. All ranks must call it."""
        everyone: list[list[Place]] = self._link.gather_objects(self._local_places())
        union = sorted({place for places in everyone for place in places})
        self._should_agree = False
        if set(union) == self._agreed:
            return
        self._agreed = set(union)
        self._step_places = [place for place in union if place[1] == STEP]
        kinds: dict[tuple[torch.dtype, torch.device], list[Place]] = {}
        for place in union:
            if place[1] != STEP:
                tensor = self._tensor(place)
                kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
        self._places = list(kinds.values())
        self.pieces = [
            FlatAverage([self._tensor(place) for place in places], self._group, wire=self._wire, by_value=True)
            for places in self._places
        ]

    def send_steps(self, weight: float) -> list[float]:
        """Return numbers for the tally: counts of steps, and 1.0 if this rank has entries that are not agreed on."""
        counts = [self._tensor(place).double() for place in self._step_places]
        self._sent: list[float] = torch.stack(counts).tolist() if counts else []
        has_more = self._agreed is not None and not set(self._local_places()) <= self._agreed
        return [*(weight * count for count in self._sent), float(has_more)]

    def finish(self, total: float, has_moved: bool, steps: list[float]) -> None:
        for piece, places in zip(self.pieces, self._places, strict=True):
            pairs = zip(places, piece.tensors, strict=True)
            positive = [tensor for place, tensor in pairs if has_moved and place[1] in NEVER_NEGATIVE]
            least = [0.5 * tensor for tensor in positive]
            piece.finish(total, has_moved)
            if positive:
                foreach_maximum_(positive, least)
        *sums, more = steps
        self._should_agree = self._should_agree or more > 0
        if total:
            for place, sent, value in zip(self._step_places, self._sent, sums, strict=True):
                if round(value / total) != sent:
                    self._tensor(place).add_(round(value / total) - sent)

    def _local_places(self) -> list[Place]:
        """Return the entries that this rank's optimizer has."""
        places: list[Place] = []
        for number, parameter in enumerate(self._parameters):
            for entry, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    places.append((number, entry, tuple(value.shape), str(value.dtype).removeprefix("torch.")))
        return places

    def _tensor(self, place: Place) -> Tensor:
        number, entry, shape, dtype = place
        parameter = self._parameters[number]
        state: dict[str, Any] = self._optimizer.state[parameter]
        if not isinstance(state.get(entry), Tensor):
            # Counts of steps stay on the host unless the optimizer is fused; torch itself moves them where needed.
            device = parameter.device if entry != STEP or _is_on_device(self._optimizer) else torch.device("cpu")
            state[entry] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        tensor: Tensor = state[entry]
        return tensor


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Reset the state: in place where it begins at 0, so that nothing is left uninitialised."""
    for parameter, entries in list(optimizer.state.items()):
        tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
        if set(entries) <= FROM_ZERO and len(tensors) == len(entries):
            foreach_zero_(list(tensors.values()))
        else:
            del optimizer.state[parameter]


def _is_on_device(optimizer: torch.optim.Optimizer) -> bool:
    defaults = optimizer.defaults
    return bool(defaults.get("fused") or defaults.get("capturable") or takes_amp_scaling(optimizer))
