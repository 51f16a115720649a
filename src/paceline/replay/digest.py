"""A number that tells whether two buffers are the same: over slot, global index and payload, whoever holds which slot.

It is a sum over slots modulo 2**64, so ranks that hold different slots add their parts and get what one process gets.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.replay.chance import bits, scramble
from paceline.replay.layout import WORD, Layout

_SLOTS, _COLUMNS = (0x736C6F,), (0x636F6C,)


def row_sums(rows: torch.Tensor, layout: Layout, exact_only: bool) -> NDArray[np.uint64]:
    """A checksum of each row, as a sum of its words times odd numbers; without floats if `exact_only`."""
    factors = (bits(_COLUMNS, np.arange(layout.row_bytes // WORD)) | np.uint64(1)).view(np.int64)
    factors = np.where(layout.words(exact_only).numpy(), factors, 0)
    # An integer product in torch wraps around on every device; `@` is not there for integers on GPUs.
    sums = (rows.view(torch.int64) * torch.from_numpy(factors).to(rows.device)).sum(1)
    return sums.cpu().numpy().view(np.uint64)


def digest(slots: NDArray[np.int64], index: NDArray[np.int64], sums: NDArray[np.uint64]) -> int:
    """The part of the digest that these slots make; parts are added modulo 2**64."""
    placed = scramble(bits(_SLOTS, slots) + index.astype(np.uint64))
    return int(scramble(placed ^ sums).sum(dtype=np.uint64))


def agreed(parts: list[int]) -> int:
    """The digest of the whole from the parts of the ranks."""
    return sum(parts) % 2**64
