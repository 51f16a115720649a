"""Steps skipped for non-finite gradients: counted on the device, read when something is logged anyway."""

from __future__ import annotations

import torch

from paceline.train.contract import TooManySkipped


class SkipCount:
    """How many steps were skipped, in all and in a row."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._limit = limit
        self._in_all = 0
        self._in_row = 0
        self._on_device = torch.zeros(2, device=device) if device.type != "cpu" else None

    def note(self, found_inf: torch.Tensor, step: int) -> None:
        if self._on_device is not None:
            self._on_device += found_inf
            self._on_device[1:] *= found_inf
        elif found_inf.item():
            self._in_all += 1
            self._in_row += 1
            self._check(step)
        else:
            self._in_row = 0

    def read(self, step: int) -> int:
        """Skipped in all (waits for the device); fails when too many came in a row."""
        in_all, _ = self.state()
        self._check(step)
        return in_all

    def state(self) -> list[int]:
        if self._on_device is not None:
            self._in_all, self._in_row = (int(value) for value in self._on_device.tolist())
        return [self._in_all, self._in_row]

    def load(self, state: list[int]) -> None:
        self._in_all, self._in_row = state
        if self._on_device is not None:
            self._on_device.copy_(torch.tensor([float(value) for value in state]))

    def _check(self, step: int) -> None:
        if self._in_row >= self._limit:
            raise TooManySkipped(self._in_row, step)
