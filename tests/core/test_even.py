"""Even split: numpy's, and the same for a plan's grains and a buffer's pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.even import even_sizes
from paceline.data.partition import cut, grain_ranks
from paceline.recipes.continual.replay.exchange import cut as cut_pieces


@given(st.integers(0, 200), st.integers(1, 20))
def test_sizes_are_numpys(num_items: int, num_pieces: int) -> None:
    assert even_sizes(num_items, num_pieces) == [len(part) for part in np.array_split(np.arange(num_items), num_pieces)]


@given(st.integers(1, 100), st.integers(1, 8), st.integers(1, 5))
def test_pieces_of_a_replay_buffer_are_the_grains_of_a_plan(num_samples: int, grains: int, num_ranks: int) -> None:
    pieces = grain_ranks(num_samples, grains, num_ranks)
    by_grain = cut(None, num_samples, grains)
    for rank in range(num_ranks):
        local = cut_pieces(num_samples, pieces, rank, num_ranks)
        of_rank = [part for part, owner in zip(by_grain, pieces, strict=True) if owner == rank]
        assert list(local.sizes) == [len(part) for part in of_rank]
        assert local.local.tolist() == [int(position) for part in of_rank for position in part]
