from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.plan import BatchRule, Plan
from paceline.recipes.translation.data.corpus import Limits
from paceline.recipes.translation.data.pairs import Collate, Encoded, Pairs, ladder
from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD


def made(lengths: list[tuple[int, int]], multiple: int = 1) -> Pairs:
    rows = [[np.arange(4, 4 + length, dtype=np.int32) for length in side] for side in zip(*lengths, strict=True)]
    return Pairs(Encoded.pack(rows[0]), Encoded.pack(rows[1]), multiple=multiple)


def test_a_grain() -> None:
    data = made([(2, 1), (1, 3)])
    grain = Collate()([data[0], data[1]])
    assert grain["source"].tolist() == [[4, 5, END], [4, END, PAD]]
    assert grain["target"].tolist() == [[BEGIN, 4, PAD, PAD], [BEGIN, 4, 5, 6]]
    assert grain["truth"].tolist() == [[4, END, PAD, PAD], [4, 5, 6, END]]
    assert data.counts.tolist() == [2, 4]
    assert int(data.counts.sum()) == int((grain["truth"] != PAD).sum())
    assert data.total_length == 3 + 2 + 2 + 4


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60), st.sampled_from([1, 8]))
def test_batches_by_tokens_count_padding(lengths: list[tuple[int, int]], multiple: int) -> None:
    """No batch has more tokens than `batch_cost`, source and target and padding together, unless one pair has."""
    data, cost = made(lengths, multiple), 200
    plan = Plan(
        len(data), rule=BatchRule(2**31 - 1, cost), grains=1, seed=0, lengths=data.lengths, counts=data.counts,
        order="bucket",
    )  # fmt: skip
    for collate in (Collate(), Collate(multiple, is_square=True)):
        for step in range(plan.num_steps):
            samples = plan.batch(step)
            grain = collate([data[int(sample)] for sample in samples])
            assert grain["source"].numel() + grain["target"].numel() <= cost or len(samples) == 1
            assert plan.count(step) == int((grain["truth"] != PAD).sum())


def test_a_ladder_has_few_shapes() -> None:
    data = made([(length, 100 - length) for length in range(1, 100)])
    collate = ladder(data, 1)
    widths = set()
    for row in range(len(data)):
        grain = collate([data[row]])
        assert grain["source"].shape == grain["target"].shape
        assert 2 * grain["source"].shape[1] == collate.padded(float(data.lengths[row]))
        widths.add(grain["source"].shape[1])
    assert len(widths) <= 32
    assert torch.equal(collate([data[3]])["source"][0, :5], Collate()([data[3]])["source"][0])


def test_limits_drop_a_pair_for_one_reason() -> None:
    source, target = np.array([1, 5, 9, 2, 30]), np.array([2, 5, 3, 30, 30])
    rows, dropped = Limits(2, 20, 2.0).keep(source, target)
    assert rows.tolist() == [1]
    assert dropped == {"shorter than 2 tokens": 1, "longer than 20 tokens": 2, "of lengths in a ratio above 2": 1}
    rows, dropped = Limits(max_pairs=3).keep(source, target)
    assert rows.tolist() == [0, 1, 2]
    assert dropped == {"behind the first 3": 2}


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=9), st.data())
def test_rows_are_packed_and_taken(rows: list[list[int]], data: st.DataObject) -> None:
    packed = Encoded.pack(rows)
    assert [packed[number].tolist() for number in range(len(packed))] == rows
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9))
    taken = packed.take(np.array(wanted, np.int64))
    assert [taken[number].tolist() for number in range(len(taken))] == [rows[number] for number in wanted]
    assert taken.lengths.tolist() == [len(rows[number]) for number in wanted]


def test_rows_outside() -> None:
    data = made([(1, 1)])
    assert data[-1].source.tolist() == [4]
    with pytest.raises(IndexError):
        data[1]


@pytest.mark.parametrize("collate", [Collate(), Collate(8, is_square=True)])
def test_a_grain_in_one_call(collate: Collate) -> None:
    data = made([(2, 1), (1, 3), (4, 4)])
    samples = np.array([2, 0])
    assert not data.reads_in_threads(collate)
    read, wanted = data.read_grain(samples, [], collate), collate([data[2], data[0]])
    assert all(torch.equal(read[name], wanted[name]) for name in ("source", "target", "truth"))
