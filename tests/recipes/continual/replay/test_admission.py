"""Decisions about what is kept: against hand-written loops, closed formulas and chi-square."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from paceline.core.keys import uniform
from paceline.recipes.continual.replay import admission
from paceline.recipes.continual.replay.admission import ADMISSION, VICTIM


def chance(seed: int, stream: int, index: int) -> float:
    return float(uniform((seed, stream), np.array([index]))[0])


@given(
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.lists(st.integers(1, 17), min_size=1, max_size=12),
)
def test_reservoir_is_vitters_loop_however_the_stream_is_cut(seed: int, capacity: int, steps: list[int]) -> None:
    kept: list[int] = []
    for index in range(sum(steps)):
        if len(kept) < capacity:
            kept.append(index)
        else:
            slot = int(chance(seed, ADMISSION, index) * (index + 1))
            if slot < capacity:
                kept[slot] = index
    ours = np.full(capacity, -1)
    first = 0
    for count in steps:
        slots = admission.reservoir(seed, first, count, capacity)
        last = admission.last_of_each(slots)
        assert len(set(slots[last])) == len(last) == len(set(slots[slots >= 0]))
        ours[slots[last]] = first + last
        first += count
    assert ours[: len(kept)].tolist() == kept
    assert (ours[len(kept) :] == -1).all()


def test_reservoir_is_uniform_over_the_stream() -> None:
    """Each of 60 items is in a buffer of 12 equally often, over 4000 seeds."""
    stream, capacity, seeds = 60, 12, 4000
    counts = np.zeros(stream)
    pairs = np.zeros((2, 2))
    for seed in range(seeds):
        held = np.full(capacity, -1)
        slots = admission.reservoir(seed, 0, stream, capacity)
        last = admission.last_of_each(slots)
        held[slots[last]] = last
        counts[held] += 1
        pairs[int(3 in held), int(47 in held)] += 1
    share = capacity / stream
    # Counts of draws without replacement vary less than multinomial ones, by the factor 1 - share.
    statistic = ((counts - seeds * share) ** 2).sum() / (seeds * share * (1 - share)) * (stream - 1) / stream
    assert chi2.ppf(0.001, stream - 1) < statistic < chi2.ppf(0.999, stream - 1)
    both = capacity * (capacity - 1) / (stream * (stream - 1))
    assert abs(pairs[1, 1] / seeds - both) < 4 * np.sqrt(both * (1 - both) / seeds)


@given(
    st.integers(0, 2**31),
    st.integers(1, 12),
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(1, 9),
)
def test_class_balanced_is_the_paper_item_by_item(seed: int, capacity: int, stream: list[int], batch: int) -> None:
    held: list[tuple[int, int]] = []  # (index, label)
    seen: dict[int, int] = {}
    full: set[int] = set()
    for index, label in enumerate(stream):
        seen[label] = seen.get(label, 0) + 1
        if len(held) < capacity:
            held.append((index, label))
            continue
        sizes = {name: sum(each[1] == name for each in held) for name in range(5)}
        largest = max(sizes.values())
        full |= {name for name, size in sizes.items() if size == largest}
        if label not in full:
            victim = next(name for name in range(5) if sizes[name] == largest)
        elif chance(seed, ADMISSION, index) * seen[label] < sizes[label]:
            victim = label
        else:
            continue
        members = [slot for slot, each in enumerate(held) if each[1] == victim]
        held[members[int(chance(seed, VICTIM, index) * len(members))]] = (index, label)

    index = np.full(capacity, -1)
    label_of = np.full(capacity, -1)
    counts = admission.ClassCounts.none()
    num_stored = 0
    for first in range(0, len(stream), batch):
        labels = np.array(stream[first : first + batch])
        slots, counts = admission.class_balanced(seed, first, labels, label_of[:num_stored], counts, capacity)
        last = admission.last_of_each(slots)
        index[slots[last]], label_of[slots[last]] = first + last, labels[last]
        num_stored = max(num_stored, int(slots.max(initial=-1)) + 1)
    assert list(zip(index[:num_stored].tolist(), label_of[:num_stored].tolist(), strict=True)) == held


def test_class_balanced_keeps_rare_classes() -> None:
    """A class with 20 of 2000 items has its equal share of the buffer; a reservoir would keep one of them."""
    random = np.random.default_rng(0)
    labels = random.permutation(np.repeat([0, 1, 2], [1000, 980, 20]))
    counts = admission.ClassCounts.none()
    held = np.zeros(0, np.int64)
    for first in range(0, len(labels), 10):
        slots, counts = admission.class_balanced(1, first, labels[first : first + 10], held, counts, 60)
        held = np.concatenate([held, np.full(max(0, int(slots.max()) + 1 - len(held)), -1)])
        last = admission.last_of_each(slots)
        held[slots[last]] = labels[first + last]
    assert np.bincount(held).tolist() == [20, 20, 20]
    assert counts.seen.tolist() == [1000, 980, 20]


def test_loss_aware_replaces_what_is_known_well() -> None:
    """The victim of a full buffer is drawn in proportion to the score above the lowest: chi-square over seeds."""
    stored = np.array([-3.0, -2.0, -1.0, -3.0])  # weights 0, 1, 2, 0
    hits = np.zeros(4)
    admitted = 0
    for seed in range(6000):
        slots = admission.loss_aware(seed, 7, np.array([-0.5]), stored, 4)
        if slots[0] >= 0:
            hits[slots[0]] += 1
            admitted += 1
    assert abs(admitted / 6000 - 4 / 8) < 4 * np.sqrt(0.25 / 6000)
    assert hits[0] == hits[3] == 0
    expected = admitted * np.array([1 / 3, 2 / 3])
    assert ((hits[1:3] - expected) ** 2 / expected).sum() < chi2.ppf(0.999, 1)
    even = [admission.loss_aware(seed, 0, np.zeros(5), np.zeros(0), 4)[4] for seed in range(200)]
    assert {-1, 0, 1, 2, 3} == set(even)


def test_herding_finds_the_best_greedy_order() -> None:
    random = np.random.default_rng(1)
    features = random.normal(size=(30, 5))
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    goal, chosen = unit.mean(0), []
    for _ in range(8):
        rest = [number for number in range(30) if number not in chosen]
        chosen.append(min(rest, key=lambda n: np.linalg.norm(goal - unit[[*chosen, n]].mean(0))))
    assert admission.herd(features, 8).tolist() == chosen
    assert sorted(admission.herd(features, 99).tolist()) == list(range(30))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 60))
def test_quotas_fill_the_buffer_as_evenly_as_classes_allow(held: list[int], capacity: int) -> None:
    given_out = admission.quotas(np.array(held), capacity)
    assert given_out.sum() == min(capacity, sum(held))
    assert (given_out <= held).all()
    for ours, has in zip(given_out, held, strict=True):
        assert ours == has or ours >= given_out.max() - 1
