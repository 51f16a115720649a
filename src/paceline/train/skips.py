"""Steps skipped for non-finite gradients: counted on the device, read when something is logged anyway."""

from __future__ import annotations

import torch

from paceline.train.loss import TooManySkipped


class SkipCount:
    """How many steps were skipped, in all and in a row."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._limit = limit
        self._in_all = 0
        self._in_row = 0
        self._noted = torch.zeros(2, device=device)  # what only the device knows yet
        self._is_on_device = False

    def note(self, is_skipped: bool, step: int) -> None:
        """A step whose fate the host knows."""
        if is_skipped:
            self._in_all += 1
            self._in_row += 1
            self._check(step)
        else:
            self._in_row = 0

    def note_on_device(self, found_inf: torch.Tensor) -> None:
        """A step whose fate only the device knows: nobody waits for it."""
        if not self._is_on_device:
            self._noted.copy_(torch.tensor([float(self._in_all), float(self._in_row)]))
            self._is_on_device = True
        self._noted += found_inf
        self._noted[1:] *= found_inf

    def read(self, step: int) -> int:
        """Skipped in all (waits for the device); fails when too many came in a row."""
        in_all, _ = self.state()
        self._check(step)
        return in_all

    def state(self) -> list[int]:
        if self._is_on_device:
            self._in_all, self._in_row = (int(value) for value in self._noted.tolist())
        return [self._in_all, self._in_row]

    def load(self, state: list[int]) -> None:
        self._in_all, self._in_row = state
        self._is_on_device = False

    def _check(self, step: int) -> None:
        if self._in_row >= self._limit:
            raise TooManySkipped(self._in_row, step)
