"""The state of an optimizer on ranks that step apart: averaged with the weights, or begun anew."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.settings import ReduceSettings
from paceline.parallel import wire
from paceline.parallel.flat import FlatAverage
from paceline.world.link import Link

STEP = "step"
FROM_ZERO = {"step", "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "exp_inf"}
"""Entries that are 0 before the first step, in torch's optimizers and ours."""
NEVER_NEGATIVE = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf"}
"""Entries whose root divides a step: a late correction must not take them to 0, so it takes half of one at most."""

Place = tuple[int, str, tuple[int, ...], str]
"""(parameter, entry, shape, dtype)"""


class StateAverage:
    """Floating-point entries of the state are averaged, counts of steps to the nearest whole number.

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
        """Which entries there are on any rank."""
        own = self._own()
        everyone: list[list[Place]] = self._link.gather_objects(own)
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
        """Numbers for the tally: counts of steps, and whether this rank has entries that are not agreed on."""
        counts = [self._tensor(place).double() for place in self._step_places]
        self._sent: list[float] = torch.stack(counts).tolist() if counts else []
        has_more = self._agreed is not None and not set(self._own()) <= self._agreed
        return [*(weight * count for count in self._sent), float(has_more)]

    def finish(self, total: float, has_moved: bool, steps: list[float]) -> None:
        for piece, places in zip(self.pieces, self._places, strict=True):
            pairs = zip(places, piece.tensors, strict=True)
            positive = [tensor for place, tensor in pairs if has_moved and place[1] in NEVER_NEGATIVE]
            least = [0.5 * tensor for tensor in positive]
            piece.finish(total, has_moved)
            if positive:
                torch._foreach_maximum_(positive, least)
        *sums, more = steps
        self._should_agree = self._should_agree or more > 0
        if total:
            for place, sent, value in zip(self._step_places, self._sent, sums, strict=True):
                if round(value / total) != sent:
                    self._tensor(place).add_(round(value / total) - sent)

    def _own(self) -> list[Place]:
        found: list[Place] = []
        for number, parameter in enumerate(self._parameters):
            for entry, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    found.append((number, entry, tuple(value.shape), str(value.dtype).removeprefix("torch.")))
        return found

    def _tensor(self, place: Place) -> Tensor:
        number, entry, shape, dtype = place
        parameter = self._parameters[number]
        state: dict[str, Any] = self._optimizer.state[parameter]
        if not isinstance(state.get(entry), Tensor):
            # Counts of steps stay on the host unless the optimizer is fused; torch itself moves them where needed.
            device = parameter.device if entry != STEP or _is_on_device(self._optimizer) else torch.device("cpu")
            state[entry] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        found: Tensor = state[entry]
        return found


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Let the state begin anew: in place where it begins at 0, so that nothing is left uninitialised."""
    for parameter, entries in list(optimizer.state.items()):
        tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
        if set(entries) <= FROM_ZERO and len(tensors) == len(entries):
            torch._foreach_zero_(list(tensors.values()))
        else:
            del optimizer.state[parameter]


def _is_on_device(optimizer: torch.optim.Optimizer) -> bool:
    defaults = optimizer.defaults
    return bool(
        defaults.get("fused") or defaults.get("capturable") or getattr(optimizer, "_step_supports_amp_scaling", 0)
    )
