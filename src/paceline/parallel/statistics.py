"""Batch-norm running statistics that do not depend on the number of ranks.

One process that runs the grains of a step in order updates r <- (1-m) r + m s for each grain's statistic s. That is
linear, so the result is a sum over grains, and each rank can keep its own share of it: it lets the layers update on
its own grains as they are, decays its share by (1-m) for each grain that another rank ran, and the shares are added
only when somebody reads them (validation, checkpoint). Rank 0's share starts with the value so far, the others' with 0.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.config.errors import PacelineError
from paceline.world.link import Link


class CumulativeBatchNorm(PacelineError):
    """A batch norm with momentum=None averages over all calls, which has no per-rank share."""

    hint = "give the layer a momentum, or train on one rank"

    def __init__(self, name: str) -> None:
        super().__init__(f"batch norm {name!r} has momentum=None, which cannot be kept exact on several ranks")
        self.name = name


class RunningStatistics:
    """The running statistics of a model's batch norms, shared out over the ranks while it trains."""

    def __init__(self, model: torch.nn.Module, link: Link) -> None:
        self._model = model
        self._link = link
        self._layers: list[_BatchNorm] = []
        self._floats: list[torch.Tensor] = []
        self._is_shared = False
        self._missed = 0  # grains that others ran since this rank's share was last decayed
        self._calls: torch.Tensor | None = None  # (layers,) calls of each layer per grain
        self._tracked: torch.Tensor | None = None
        self._keep: torch.Tensor | None = None  # (layers,) 1 - momentum

    def share(self) -> None:
        """From totals to shares; layers that are not in training mode keep their totals."""
        if self._is_shared or self._link.world.size == 1:
            return
        self._layers, self._floats = [], []
        for name, module in self._model.named_modules():
            if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
                if module.momentum is None:
                    raise CumulativeBatchNorm(name)
                self._layers.append(module)
                self._floats += [module.get_buffer("running_mean"), module.get_buffer("running_var")]
        if self._layers and not self._link.is_first:
            torch._foreach_zero_([*self._floats, *self._counters()])
        self._calls = self._tracked = None
        if self._layers:
            self._tracked = torch.stack(self._counters())
            momenta = torch.tensor([layer.momentum for layer in self._layers], dtype=torch.float64)
            self._keep = (1.0 - momenta).to(self._floats[0].device)
        self._missed = 0
        self._is_shared = True

    def total(self) -> None:
        """From shares to totals, on every rank. All ranks must call it."""
        if not self._is_shared:
            return
        self._is_shared = False
        if not self._layers:
            return
        self._decay()
        floats = torch.cat([tensor.reshape(-1).double() for tensor in self._floats])
        counters = torch.stack(self._counters())
        self._link.all_reduce(floats)
        self._link.all_reduce(counters)
        pieces = floats.split([tensor.numel() for tensor in self._floats])
        for tensor, piece in zip(self._floats, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
        for tensor, value in zip(self._counters(), counters.unbind(), strict=True):
            tensor.copy_(value)

    def missed(self, num_grains: int) -> None:
        """Other ranks ran (or will have run) this many grains before this rank's next one."""
        self._missed += num_grains

    def before_grain(self) -> None:
        if self._missed and self._layers:
            self._decay()
        self._missed = 0

    def after_grain(self) -> None:
        if self._tracked is not None:
            tracked = torch.stack(self._counters())
            self._calls = tracked - self._tracked
            self._tracked = tracked

    def _decay(self) -> None:
        if not self._missed or self._keep is None:
            return
        factors = self._keep.pow(self._missed if self._calls is None else self._calls * self._missed)
        torch._foreach_mul_(self._floats, [factor for factor in factors.unbind() for _ in range(2)])
        self._missed = 0

    def _counters(self) -> list[torch.Tensor]:
        return [layer.get_buffer("num_batches_tracked") for layer in self._layers]
