"""Packed strings are the strings that went in."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline.data.strings as module
from paceline.data.strings import Strings

TEXTS = st.lists(st.text(max_size=8), max_size=30)


def pack(values: list[str]) -> Strings:
    return Strings.pack(value.encode() for value in values)


def unpack(column: Strings) -> list[str]:
    return [column[row] for row in range(len(column))]


@given(TEXTS, TEXTS)
def test_as_a_list(left: list[str], right: list[str]) -> None:
    both = Strings.concat([pack(left), pack([]), pack(right)])
    assert unpack(both) == left + right
    assert both.packed.tobytes().decode() == "".join(left + right)
    assert unpack(pickle.loads(pickle.dumps(both))) == left + right


@given(TEXTS.filter(bool), st.data())
def test_taken_in_any_order(values: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS_AT_ONCE", 3)
        taken = pack(values).take(np.array(rows, dtype=np.int64))
    assert unpack(taken) == [values[row] for row in rows]
    assert unpack(taken.take(np.arange(len(rows))[::-1])) == [values[row] for row in rows[::-1]]


def test_rows_are_counted_from_both_ends() -> None:
    column = pack(["a", "", "ü"])
    assert (column[-1], column[-3]) == ("ü", "a")
    for row in (3, -4):
        with pytest.raises(IndexError):
            column[row]
