from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.fetch import Fetch, Request
from paceline.data.plan import BatchRule, Plan
from paceline.data.thread_reader import Slot, ThreadReader
from paceline.recipes.translation.data.packed import (
    MOST_SHAPES,
    CollatePacked,
    Needs,
    PackedLadder,
    PackedShape,
    fitted_shapes,
)
from paceline.recipes.translation.data.pairs import Encoded, Pairs
from paceline.recipes.translation.text.vocabulary import PAD
from paceline.speed.graphs import tensors
from paceline.train.autotune.shapes import fitted, shapes_ahead

LENGTHS = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=40)


def made(lengths: Any) -> Pairs:
    rows = [[np.arange(4, 4 + length, dtype=np.int32) for length in side] for side in zip(*lengths, strict=True)]
    return Pairs(Encoded.pack(rows[0]), Encoded.pack(rows[1]))


def corpus(num_pairs: int) -> Pairs:
    """Pairs of the lengths that sentences have."""
    dice = np.random.default_rng(0)
    source = np.clip(np.round(dice.lognormal(np.log(24), 0.5, num_pairs)), 2, 120).astype(int)
    return made(list(zip(source, np.ceil(source * dice.uniform(0.8, 1.3, num_pairs)).astype(int), strict=True)))


def epoch_of(data: Pairs, cost: float, epoch: int, grains: int = 1) -> Plan:
    return Plan(
        len(data), rule=BatchRule(2**31 - 1, cost), grains=grains, seed=0, epoch=epoch, lengths=data.lengths,
        counts=data.counts, order="bucket",
    )  # fmt: skip


@settings(max_examples=25)
@given(LENGTHS, st.booleans())
def test_packed_grains_of_few_shapes(lengths: list[tuple[int, int]], is_larger: bool) -> None:
    """The sentences as they are, then padding: its shape is known from the lengths alone, before it is made."""
    data = made(lengths)
    pairs = [data[number] for number in range(len(data))]
    collate = PackedLadder(data, (PackedShape(4096, 8192, 512, 128),) if is_larger else ())
    plain, padded = CollatePacked()(pairs), collate(pairs)
    for name in ("source", "target", "truth"):
        tokens = padded[name]
        assert torch.equal(tokens[: len(plain[name])], plain[name])
        assert not (tokens[len(plain[name]) :] != PAD).any()
    shape, cost = collate.shape(np.arange(len(data)))
    assert (shape in collate.shapes) == is_larger
    assert (shape.source, shape.target) == (len(padded["source"]), len(padded["target"]))
    assert cost == shape.source + shape.target
    for packing, total in ((padded["packings"].source, shape.source), (padded["packings"].target, shape.target)):
        assert (packing.num_sequences, packing.longest, packing.num_tokens) == (shape.sentences, shape.longest, total)
        assert int(packing.offsets.diff().max()) <= shape.longest
        assert int(packing.offsets[-1]) == total
    if shape.source > 256 and not is_larger:
        assert shape.source < 1.07 * len(plain["source"])


@pytest.mark.parametrize("collate", [CollatePacked(), PackedLadder()])
def test_threads_read_what_is_collated(collate: Any) -> None:
    data = made([(2, 1), (1, 3), (9, 20), (5, 5)])
    samples = np.array([2, 0, 3])
    wanted = list(tensors(collate([data[number] for number in samples.tolist()])))
    slot = Slot(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    assert data.reads_in_threads(collate)
    for read in (data.read_grain(samples, [], collate), data.read_grain_into(samples, [], collate, slot.room)):
        assert [each.dtype for each in tensors(read)] == [each.dtype for each in wanted]
        assert all(torch.equal(one, other) for one, other in zip(tensors(read), wanted, strict=True))


def test_a_run_reads_by_threads() -> None:
    """Grains in their order, from slots that are used again: as the training process reads them itself."""
    data = corpus(300)
    plan = epoch_of(data, 1000.0, 0)
    collate = fitted(PackedLadder(data), [plan])
    fetch = Fetch(data, collate, 0)
    requests = [Request(0, 0, plan.batch(step)) for step in range(plan.num_steps)]
    reader = ThreadReader(fetch, 3)
    for request, grain in zip(requests, reader.read(iter(requests)), strict=True):
        pairs = zip(tensors(grain.data), tensors(fetch(request).data), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    reader.close()


@settings(max_examples=25)
@given(st.lists(LENGTHS, min_size=1, max_size=30), st.integers(1, 8))
def test_fitted_shapes_hold_all_grains(grains: list[list[tuple[int, int]]], most: int) -> None:
    needs = [Needs.of(*np.array(lengths).T) for lengths in grains]
    shapes = fitted_shapes(np.array(needs), most)
    assert len(shapes) <= most
    assert all(any(shape.holds(need) for shape in shapes) for need in needs)
    assert fitted_shapes(np.array(needs), most) == shapes


@pytest.mark.parametrize(
    ("cost", "num_grains", "added"), [(2500.0, 1, 0.03), (10_000.0, 1, 0.03), (10_000.0, 4, 0.035)]
)
def test_shapes_of_all_epochs_are_known_before_the_first(cost: float, num_grains: int, added: float) -> None:
    data = corpus(6000)
    collate: Any = fitted(PackedLadder(data), (epoch_of(data, cost, epoch, num_grains) for epoch in count()))
    plans = [epoch_of(data, cost, epoch, num_grains) for epoch in range(20)]
    ahead = shapes_ahead(plans, 64, collate).picks
    known = {collate.shape(plans[pick.epoch].grains(pick.step)[pick.number])[0] for pick in ahead}
    grains = [grain for plan in plans for step in range(plan.num_steps) for grain in plan.grains(step)]
    shapes = [collate.shape(grain)[0] for grain in grains]
    assert set(shapes) == known <= set(collate.shapes)
    assert len(known) <= MOST_SHAPES
    num_tokens = sum(int((data.source_lengths[grain] + data.target_lengths[grain]).sum()) for grain in grains)
    assert sum(shape.source + shape.target for shape in shapes) <= (1 + added) * num_tokens
