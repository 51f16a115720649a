"""Loss scaling: keeps fp16 gradients between underflow and overflow. All state and all decisions stay on the device.

A step uses one as `sum.backward(seed(sum, count))`, then `unscale_and_check(gradients, found_inf)`, then (where
found_inf is 0) the optimizer, then `update(found_inf)`. Only `current`, which is for logs, reads a value on the host.
Rules after OpenSeq2Seq's automatic loss scaling; `backoff` is also the rule of torch's GradScaler.

The first scale of a run is found by `search` on its first batch, so that no step is lost on the way down to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import Conflict, InvalidSetting
from paceline.core.torch_private import foreach_mul_, foreach_norm, unscale_and_check_, update_scale_
from paceline.speed.precision import Precision

SCALE_MIN = 1.0
SCALE_MAX = 2.0**14
WINDOW_STEPS = 2000
"""Steps without an overflow after which a scale is doubled."""
SCALE_LIMIT = 2.0**24
"""The largest maximum that may be set: beyond it an fp32 scale times a loss gains nothing and risks overflow itself."""
_LARGE = 1 << 14
"""Elements from which a gradient is worth a call of its own on a CPU."""
HEADROOM = 4.0
"""A scale that had to be searched for starts so many times below the first overflow: gradients may still grow."""


class LossScale:
    """Base of all kinds: a factor on the loss, taken off the gradients again."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self._scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def seed(self, loss: Tensor, count: float) -> Tensor:
        """Return the gradient to run backward from `loss` with: that of scale * loss / count by the loss."""
        return (self._scale.double() / count).to(loss.dtype)

    def unscale_and_check(self, gradients: list[Tensor], found_inf: Tensor) -> None:
        """Divide the gradients by the scale, in place; `found_inf` becomes 1 if any element is not finite."""
        # Through float64, so that the inverse of a scale that is no power of two is rounded once.
        _unscale(gradients, found_inf, self._scale.double().reciprocal().float())

    def observed(self) -> list[Tensor]:
        """Return numbers that `unscale_and_check` has found and `update` needs; of ranks with pieces, the largest."""
        return []

    def update(self, found_inf: Tensor) -> None:
        """Choose the scale of the next step."""

    @property
    def is_found(self) -> bool:
        """False if a new run should call `find` with its first batch."""
        return True

    def find(self, overflows: Callable[[], bool]) -> None:
        """Set the scale that a run starts with; `overflows()` tries the first batch with the scale of the moment."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything the next step depends on, as plain tensors."""
        return {name: tensor.detach().clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        tensors = self._state()
        if tensors.keys() != state.keys():
            raise Conflict(
                f"loss scaling needs the state {sorted(tensors)}, the checkpoint has {sorted(state)}",
                hint="resume with the `loss_scale` and `precision` of the run",
            )
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    def current(self) -> float:
        """The scale of the next step. Waits for the device: for logs only."""
        return float(self._scale)

    def _state(self) -> dict[str, Tensor]:
        return {"scale": self._scale}


class NoScale(LossScale):
    """No scaling, only the check for non-finite gradients."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(1.0, device)
        self._seed: Tensor | None = None  # of the last step: most steps have the same count
        self._count = 0.0

    def seed(self, loss: Tensor, count: float) -> Tensor:
        if self._seed is None or count != self._count or loss.dtype != self._seed.dtype:
            self._seed, self._count = torch.full_like(loss, 1.0 / count), count
        return self._seed

    def unscale_and_check(self, gradients: list[Tensor], found_inf: Tensor) -> None:
        if found_inf.device.type == "cpu":
            gradients = [gradient for gradient in gradients if not _is_surely_finite(gradient)]
        if gradients:
            _unscale(gradients, found_inf, self._scale)

    def _state(self) -> dict[str, Tensor]:
        return {}


class StaticScale(LossScale):
    """One scale for the whole run."""


class BackoffScale(LossScale):
    """As large as goes: half after an overflow, double after a window of clean steps.

    It starts at the largest scale, or below the first overflow of the first batch, where `find` is called.
    """

    def __init__(
        self,
        device: torch.device,
        scale_min: float = SCALE_MIN,
        scale_max: float = SCALE_MAX,
        factor: float = 2.0,
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        _check_range(scale_min, scale_max)
        super().__init__(scale_max, device)
        self._bounds = (scale_min, scale_max)
        self._factor = factor
        self._window_steps = window_steps
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._is_found = False

    @property
    def is_found(self) -> bool:
        return self._is_found

    def find(self, overflows: Callable[[], bool]) -> None:
        def overflows_at(scale: float) -> bool:
            self._scale.fill_(scale)
            return overflows()

        self._scale.fill_(search(*self._bounds, overflows_at))
        self._is_found = True

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._is_found = True

    def update(self, found_inf: Tensor) -> None:
        update_scale_(self._scale, self._clean_steps, found_inf, self._factor, 1.0 / self._factor, self._window_steps)
        self._scale.clamp_(*self._bounds)

    def _state(self) -> dict[str, Tensor]:
        return {"scale": self._scale, "clean_steps": self._clean_steps}


class LogMaxScale(LossScale):
    """The scale at which an overflow becomes rare, from the statistics of the largest gradient.

    With x = log2(max|g|): scale = 2 ** (log_max - (mu + overflow_std_dev * sigma)), mu a fast and sigma a slow moving
    estimate. A non-finite step counts as x = log_max; one whose gradients are all zero says nothing and is left out.
    """

    def __init__(
        self,
        device: torch.device,
        scale_min: float = SCALE_MIN,
        scale_max: float = SCALE_MAX,
        log_max: float = 16.0,
        beta1: float = 0.99,
        beta2: float = 0.999,
        overflow_std_dev: float = 3.09,
    ) -> None:
        _check_range(scale_min, scale_max)
        # Before the first gradient is seen only the smallest scale is known to be safe.
        super().__init__(scale_min, device)
        self._bounds = (scale_min, scale_max)
        self._log_max = log_max
        self._overflow_std_dev = overflow_std_dev
        # Mean (beta1), slow mean and mean of squares (beta2). float64: sigma is a difference of near-equal numbers.
        self._betas = torch.tensor([beta1, beta2, beta2], dtype=torch.float64, device=device)
        self._moments = torch.zeros(3, dtype=torch.float64, device=device)
        self._decays = torch.ones(3, dtype=torch.float64, device=device)  # beta ** steps, for the bias correction
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def unscale_and_check(self, gradients: list[Tensor], found_inf: Tensor) -> None:
        # Before unscaling: an fp16 gradient would underflow by it. Empty ones are pieces of short tensors (`shard`).
        groups = _by_dtype([gradient for gradient in gradients if gradient.numel()])
        largest = [torch.stack(foreach_norm(group, float("inf"))).max().double() for group in groups]
        self._largest.copy_(torch.stack(largest).max() / self._scale if largest else torch.zeros_like(self._largest))
        super().unscale_and_check(gradients, found_inf)

    def observed(self) -> list[Tensor]:
        return [self._largest]

    def update(self, found_inf: Tensor) -> None:
        overflow = found_inf.reshape(()) > 0
        x = torch.where(overflow, self._log_max, self._largest.log2())
        known = overflow | (self._largest > 0)
        moments = torch.lerp(torch.stack((x, x, x * x)), self._moments, self._betas)
        self._moments.copy_(torch.where(known, moments, self._moments))
        self._decays.copy_(torch.where(known, self._decays * self._betas, self._decays))
        mean, slow_mean, mean_square = (self._moments / (1.0 - self._decays)).unbind()
        deviation = (mean_square - slow_mean * slow_mean).clamp(min=0.0).sqrt()
        proposed = torch.exp2(self._log_max - (mean + self._overflow_std_dev * deviation)).clamp(*self._bounds)
        self._scale.copy_(torch.where(self._decays[0] < 1.0, proposed, self._scale))

    def _state(self) -> dict[str, Tensor]:
        return {"scale": self._scale, "moments": self._moments, "decays": self._decays}


def search(scale_min: float, scale_max: float, overflows: Callable[[float], bool]) -> float:
    """Return the scale to start with: the largest if that does not overflow, else `HEADROOM` below the largest of its
    halves that does not; the smallest if all do.

    Bisection: five calls at most for scales from 1 to 2^14.
    """
    if not overflows(scale_max):
        return scale_max
    # Scales are scale_max / 2**halvings. At `too_few` halvings it overflows, at `enough` it does not, as far as known.
    too_few, enough = 0, math.floor(math.log2(scale_max / scale_min)) + 1
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if overflows(scale_max / 2.0**middle):
            too_few = middle
        else:
            enough = middle
    return max(scale_min, scale_max / 2.0**enough / HEADROOM)


def build(setting: Literal["backoff", "logmax"] | float, precision: Precision, device: torch.device) -> LossScale:
    """The loss scaling that `loss_scale` names, where the precision is scaled at all."""
    if not precision.scaled:
        return NoScale(device)
    if setting == "backoff":
        return BackoffScale(device)
    if setting == "logmax":
        return LogMaxScale(device)
    return StaticScale(float(setting), device)


def describe(setting: Literal["backoff", "logmax"] | float) -> str:
    """Return in words how a setting scales losses."""
    if setting == "backoff":
        first = f"{SCALE_MAX:,.0f} at first, or what the first batch allows"
        return f"dynamic (backoff): {first}; half after an overflow, double after {WINDOW_STEPS:,} steps without"
    if setting == "logmax":
        return "dynamic (logmax): from the statistics of the largest gradient"
    return f"constant: {setting:,g}"


def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply by a number, in place; in the gradients' dtype, to which it is rounded anyway: else each is a kernel."""
    for group in _by_dtype(gradients):
        foreach_mul_(group, factor.to(group[0].dtype))


def _check_range(scale_min: float, scale_max: float) -> None:
    if not 0.0 < scale_min <= scale_max <= SCALE_LIMIT:
        raise InvalidSetting(
            f"no loss scale between {scale_min:g} and {scale_max:g}",
            hint=f"choose 0 < scale_min <= scale_max <= {SCALE_LIMIT:.0f}",
        )


def _is_surely_finite(gradient: Tensor) -> bool:
    """Return True if the squares of a large gradient have a finite sum; False says nothing.

    On a CPU this reads it once at the speed of the memory, where torch's check computes on, and stores, each element.
    """
    is_fit = (
        gradient.dtype in (torch.float32, torch.float64) and gradient.numel() >= _LARGE and gradient.is_contiguous()
    )
    if not is_fit or type(gradient) is not Tensor:  # a DTensor does not lie in one place
        return False
    flat = gradient.view(-1)
    return math.isfinite(torch.dot(flat, flat))


def _unscale(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    if len({gradient.dtype for gradient in gradients}) == 1:
        unscale_and_check_(gradients, found_inf, inverse_scale)
        return
    for group in _by_dtype(gradients):
        unscale_and_check_(group, found_inf, inverse_scale)


def _by_dtype(gradients: list[Tensor]) -> list[list[Tensor]]:
    """The fused kernels take one dtype at a time. All gradients of a rank are on its one device."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.dtype, []).append(gradient)
    return list(groups.values())
