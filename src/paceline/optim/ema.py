"""An exponential moving average of the weights, which often validates better than the last weights do.

After each step, a skipped one too: average <- decay * average + (1 - decay) * weight. Buffers (batch-norm statistics)
are not averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from paceline.core.torch_private import foreach_copy_, foreach_lerp_


class WeightAverage:
    """The average of a model's parameters, or of named tensors (fp32 masters in place of fp16 weights, say).

    It follows the tensors given, which must stay the same objects. Of half-precision tensors it keeps an fp32 average:
    in theirs, small steps would be lost.
    """

    def __init__(self, source: nn.Module | Mapping[str, Tensor], decay: float) -> None:
        named = dict(source.named_parameters()) if isinstance(source, nn.Module) else dict(source)
        self.decay = decay
        self.tensors: dict[str, Tensor] = {
            name: tensor.detach().to(_average_dtype(tensor.dtype), copy=True) for name, tensor in named.items()
        }
        self.statistics: dict[str, Tensor] = {}
        """Batch-norm statistics of the average, by buffer; those of the weights count where there are none."""
        self._sources = [tensor.detach() for tensor in named.values()]
        self._averages = list(self.tensors.values())
        self._same_dtype = all(
            average.dtype == source.dtype for average, source in zip(self._averages, self._sources, strict=True)
        )

    def go_on_from(self, before: WeightAverage | None) -> None:
        """Take over an earlier average, where that was of the same shapes."""
        if before is not None and {name: tensor.shape for name, tensor in before.tensors.items()} == {
            name: tensor.shape for name, tensor in self.tensors.items()
        }:
            self.load_state_dict(before.tensors)

    def fraction(self, step: int) -> float:
        """Return the share of the way to the weights that the average moves after the `step`-th step, from 1."""
        return 1.0 - self.decay

    @torch.no_grad()
    def update(self, step: int = 1) -> None:
        """Move the average towards the weights as they are now, after the `step`-th step."""
        fraction = self.fraction(step)
        if fraction == 0.0:
            return
        sources = self._sources
        if not self._same_dtype:
            sources = [source.to(average.dtype) for source, average in zip(sources, self._averages, strict=True)]
        foreach_lerp_(self._averages, sources, fraction)

    def wants_statistics(self, step: int) -> bool:
        """Return True if the average has batch-norm statistics of its own, to be measured by now."""
        return False

    @contextlib.contextmanager
    def swapped(
        self, model: nn.Module | Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """The model with the average as its weights, inside the `with`; then its own weights again, bitwise. So of
        those `buffers` that the average has `statistics` of."""
        parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
        targets = [parameters[name].detach() for name in self.tensors]
        averages = list(self._averages)
        for name, value in (buffers or {}).items():
            if name in self.statistics:
                targets.append(value)
                averages.append(self.statistics[name].to(value))
        saved = [target.clone() for target in targets]
        try:
            foreach_copy_(targets, averages)
            yield
        finally:
            foreach_copy_(targets, saved)

    def state_dict(self) -> dict[str, Tensor]:
        """Name of a weight -> its average (the live tensors, not copies), and the statistics of the average."""
        return {**self.tensors, **self.statistics}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, average in self.tensors.items():
            average.copy_(state[name])


def _average_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
