"""Blocks of rows, which digests are of."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.packed.layout import cut_blocks


@given(st.lists(st.integers(0, 500), max_size=50), st.integers(1, 8), st.integers(1, 2000))
def test_blocks_are_all_rows_once(lengths: list[int], step_bytes: int, block_bytes: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    blocks = cut_blocks(starts, step_bytes, block_bytes)
    assert blocks[0] == 0
    assert blocks[-1] == len(lengths)
    assert np.all(np.diff(blocks) > 0)
    sizes = step_bytes * np.diff(starts[blocks])
    assert np.all(sizes[:-1] >= block_bytes)
