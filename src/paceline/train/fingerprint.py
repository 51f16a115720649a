"""Whether data is the same: on all ranks, and when a run is resumed.

The order of data is computed from its size and lengths; ranks with other data would go apart without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import PacelineError


class RanksDiffer(PacelineError):
    """Ranks have read other data."""

    hint = "let all ranks read the same files; a copy on one of the machines may be old or cut short"

    def __init__(self, sizes: Sequence[int]) -> None:
        first = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)
        what = "of the same size, but not the same" if first is None else f"{sizes[first]:,} samples on rank {first}"
        super().__init__(f"ranks have other training data: {sizes[0]:,} samples on rank 0, {what}")
        self.sizes = tuple(sizes)


class DataChanged(PacelineError):
    """A run is to be resumed on other data than it was trained on."""

    hint = "give it the data that it began with, or add `--allow-change` to go on with the new one"

    def __init__(self) -> None:
        what = "the training data is not what it was when the run was saved"
        super().__init__(f"{what}: samples would be left out or repeated")


def fingerprint(data: Any, lengths: NDArray[Any] | None, counts: NDArray[Any] | None) -> str:
    """Of all that decides the order of a data set, and of what it says of its content (`fingerprint`), if it does."""
    digest = xxhash.xxh3_64(len(data).to_bytes(8, "little"))
    for column in (lengths, counts):
        if column is not None:
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)
    own = getattr(data, "fingerprint", None)
    if isinstance(own, str):
        digest.update(own.encode())
    return digest.hexdigest()


def check_ranks(everyone: Sequence[tuple[int, str]]) -> None:
    """Everyone's (size, fingerprint) must be the same."""
    if len(set(everyone)) > 1:
        raise RanksDiffer([size for size, _ in everyone])
