"""Rows of tokens added to their table, in pieces: the kernels against `index_add_`, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.speed.layers import occurrences
from paceline.speed.layers.occurrences import Occurrences, add_rows

SOME = st.integers(0, 5) | st.sampled_from([65535, 65536, 65541, 2**31 - 1])
"""A few tokens, also of more than 16 bits."""


@given(st.lists(SOME, min_size=1, max_size=100))
def test_every_place_is_in_one_piece_of_its_token(tokens: list[int]) -> None:
    found = Occurrences.of(np.array(tokens))
    order, pieces, of_tokens, names = (each.tolist() for each in found)
    assert [len(each) for each in found] == [len(tokens), len(tokens) + 1, len(tokens) + 1, len(tokens)]
    seen: list[int] = []
    for number in range(len(set(tokens))):
        places: list[int] = []
        for piece in range(of_tokens[number], of_tokens[number + 1]):
            part = order[pieces[piece] : pieces[piece + 1]]
            assert 0 < len(part) <= occurrences.PIECE
            places += part
        assert places == [place for place, token in enumerate(tokens) if token == names[number]]
        seen += places
    assert sorted(seen) == list(range(len(tokens)))
    assert set(of_tokens[len(set(tokens)) :]) == {of_tokens[-1]}  # the rest is empty


def test_kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.speed.layers.kernels import embedded_rows

    monkeypatch.setattr(occurrences, "PIECE", 4)
    tokens = np.array([3, 3, 7, 3, 0, 3, 9, 3, 3, 0, 3] + [7] * 9)
    dice = torch.Generator().manual_seed(0)
    rows, table = torch.randn(len(tokens), 24, generator=dice), torch.randn(12, 24, generator=dice)
    expected, found = table.clone(), table.clone()
    add_rows(expected, torch.from_numpy(tokens), rows, Occurrences.of(tokens), 2.0)
    torch.testing.assert_close(expected, table.index_add(0, torch.from_numpy(tokens), rows, alpha=2.0))
    embedded_rows.add_rows(found, rows, Occurrences.of(tokens), 2.0)
    torch.testing.assert_close(found, expected)
