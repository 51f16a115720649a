"""The payload that a rank holds: rows of bytes on its device, more of them as they are needed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.replay.layout import Layout

Integers = NDArray[np.int64]


class Store:
    """Rows by number; at most `capacity` of them, and `num_rows` to begin with."""

    def __init__(self, layout: Layout, capacity: int, num_rows: int, device: torch.device) -> None:
        self._layout, self._capacity, self._device = layout, capacity, device
        self.rows = layout.empty(num_rows, device)

    def read(self, numbers: Integers) -> torch.Tensor:
        return self.rows.index_select(0, self.index(numbers))

    def write(self, numbers: Integers, payload: torch.Tensor, num_rows: int) -> None:
        """Put rows where they belong, with room for `num_rows` in all."""
        if num_rows > len(self.rows):
            room = max(num_rows, min(self._capacity, len(self.rows) + len(self.rows) // 2))
            grown = self._layout.empty(room, self._device)
            grown[: len(self.rows)] = self.rows
            self.rows = grown
        if len(numbers):
            self.rows.index_copy_(0, self.index(numbers), payload)

    def index(self, numbers: Integers) -> torch.Tensor:
        """Numbers of the host, on the device."""
        found = torch.from_numpy(np.ascontiguousarray(numbers))
        return found if self._device.type == "cpu" else found.to(self._device, non_blocking=True)
