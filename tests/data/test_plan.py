"""The plan against brute force, closed formulas and a plain re-implementation of RETURNN's orders."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.data.partition import CUT_TOLERANCE, MIN_GRAIN, assign, cut
from paceline.data.plan import ORDERS, BadPlanSetting, BadSampleNumbers, BatchRule, LengthsNeeded, Plan

quick = settings(max_examples=60)
lengths_of_any_kind = st.one_of(
    st.lists(st.integers(0, 300), min_size=1, max_size=80).map(lambda values: np.array(values, dtype=np.uint16)),
    st.lists(st.floats(0, 40, width=32), min_size=1, max_size=80).map(
        lambda values: np.array(values, dtype=np.float64)
    ),
)
rules = st.builds(BatchRule, st.integers(1, 30), st.none() | st.floats(0.5, 500))


@st.composite
def plan_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Everything a plan with lengths is made of, `epoch` and `partition_epoch` aside."""
    lengths = draw(lengths_of_any_kind)
    return {
        "num_samples": len(lengths),
        "rule": draw(rules),
        "grains": draw(st.integers(1, 9)),
        "seed": draw(st.integers(-5, 2**64 - 1)),
        "lengths": lengths,
        "order": draw(st.sampled_from(ORDERS)),
        "bins": draw(st.none() | st.integers(1, 20)),
        "stream": draw(st.integers(0, 5)),
    }


def samples(plan: Plan) -> list[int]:
    return [int(sample) for step in range(plan.num_steps) for sample in plan.batch(step)]


@quick
@given(plan_arguments(), st.data())
def test_every_sample_once_over_the_sub_epochs(arguments: dict[str, Any], data: st.DataObject) -> None:
    num_samples = arguments["num_samples"]
    parts = data.draw(st.integers(1, min(7, num_samples)))
    full_epoch = data.draw(st.integers(0, 1000))
    plans = [Plan(**arguments, epoch=full_epoch * parts + part, partition_epoch=parts) for part in range(parts)]
    assert sorted(sample for plan in plans for sample in samples(plan)) == list(range(num_samples))
    sizes = [plan.num_samples for plan in plans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [len(samples(plan)) for plan in plans]


@quick
@given(plan_arguments())
def test_batches_keep_the_rule_and_are_as_large_as_it_allows(arguments: dict[str, Any]) -> None:
    rule, lengths = arguments["rule"], arguments["lengths"].astype(float)
    plan = Plan(**arguments)
    batches = [plan.batch(step) for step in range(plan.num_steps)]

    def fits(ids: np.ndarray) -> bool:
        return len(ids) <= rule.max_samples and (
            rule.max_cost is None or len(ids) == 1 or len(ids) * lengths[ids].max() <= rule.max_cost
        )

    assert all(len(batch) >= 1 and fits(batch) for batch in batches)
    if arguments["order"] != "bucket":  # whose batches are shuffled after the cut
        for batch, following in itertools.pairwise(batches):
            assert not fits(np.append(batch, following[0]))


@quick
@given(plan_arguments(), st.integers(1, 12), st.data())
def test_shares_deal_out_the_same_grains_at_any_world_size(
    arguments: dict[str, Any], size: int, data: st.DataObject
) -> None:
    counts = data.draw(
        st.lists(st.integers(0, 50), min_size=arguments["num_samples"], max_size=arguments["num_samples"])
    )
    plan = Plan(**arguments, counts=np.array(counts))
    for step in range(plan.num_steps):
        batch, grains = plan.batch(step), plan.grains(step)
        assert sorted(np.concatenate(grains).tolist()) == sorted(batch.tolist())
        assert len(grains) == min(arguments["grains"], max(1, len(batch) // MIN_GRAIN))
        assert min(map(len, grains)) >= min(MIN_GRAIN, len(batch))
        dealt: dict[int, np.ndarray] = {}
        for rank in range(size):
            share = plan.share(step, rank, size)
            assert list(share.numbers) == sorted(share.numbers)
            assert (share.num_grains, share.num_samples) == (len(grains), len(batch))
            assert share.count == plan.count(step) == sum(counts[sample] for sample in batch)
            assert not dealt.keys() & set(share.numbers)
            dealt.update(zip(share.numbers, share.grains, strict=True))
        assert sorted(dealt) == list(range(len(grains)))
        assert all(np.array_equal(dealt[number], grain) for number, grain in enumerate(grains))


@quick
@given(plan_arguments(), st.integers(0, 50))
def test_the_same_arguments_give_the_same_plan_and_seeking_equals_iterating(
    arguments: dict[str, Any], epoch: int
) -> None:
    walked, sought = Plan(**arguments, epoch=epoch), Plan(**arguments, epoch=epoch)
    steps = [walked.batch(step).tolist() for step in range(walked.num_steps)]
    for step in reversed(range(sought.num_steps)):
        assert sought.batch(step).tolist() == steps[step]
    assert sought.num_steps == len(steps)


def test_seed_epoch_and_stream_each_give_another_order_and_none_meet() -> None:
    keys = list(itertools.product((0, 1, 2, 2**32, 2**32 + 1, 2**63), (0, 1, 2, 2**32), (0, 1, 2)))
    orders = {
        tuple(samples(Plan(50, rule=BatchRule(50), grains=1, seed=seed, epoch=epoch, stream=stream)))
        for seed, epoch, stream in keys
    }
    assert len(orders) == len(keys)


def test_sub_epochs_share_the_order_of_their_full_epoch() -> None:
    settings = {"rule": BatchRule(7), "grains": 2, "seed": 3}
    for full_epoch in (0, 4):
        parts = [Plan(100, epoch=full_epoch * 3 + part, partition_epoch=3, **settings) for part in range(3)]
        whole = Plan(100, epoch=full_epoch, **settings)
        assert [sample for part in parts for sample in samples(part)] == samples(whole)


def test_the_plan_does_not_follow_later_changes_of_the_callers_arrays() -> None:
    lengths, counts = np.arange(1, 21), np.ones(20)
    plan = Plan(20, rule=BatchRule(20), grains=4, seed=0, lengths=lengths, counts=counts, order="none")
    before = [grain.tolist() for grain in plan.grains(0)], plan.count(0)
    lengths[:], counts[:] = lengths[::-1].copy(), 7
    plan.batch(0)[:] = 0
    assert ([grain.tolist() for grain in plan.grains(0)], plan.count(0)) == before


@quick
@given(lengths_of_any_kind, st.integers(1, 12), st.integers(0, 9))
def test_laplace_is_returnns(lengths: np.ndarray, bins: int, epoch: int) -> None:
    settings = {"rule": BatchRule(len(lengths)), "grains": 1, "seed": 5, "epoch": epoch}
    permuted = samples(Plan(len(lengths), order="random", **settings))
    expected: list[int] = []
    for number in range(bins):
        part = permuted[number * len(permuted) // bins : (number + 1) * len(permuted) // bins]
        part.sort(key=lambda sample: lengths[sample], reverse=number % 2 == 1)
        expected += part
    assert samples(Plan(len(lengths), lengths=lengths, order="laplace", bins=bins, **settings)) == expected


def test_orders_none_and_sorted() -> None:
    lengths = np.array([3, 1, 2, 1, 3])
    settings = {"rule": BatchRule(2), "grains": 1, "seed": 0, "lengths": lengths}
    assert samples(Plan(5, order="none", **settings)) == [0, 1, 2, 3, 4]
    assert samples(Plan(5, order="sorted", **settings)) == [1, 3, 2, 0, 4]


def test_bucket_batches_are_random_inside_narrow_in_length_and_shuffled() -> None:
    lengths = np.random.default_rng(0).permutation(1600)
    settings = {"rule": BatchRule(20), "grains": 1, "seed": 1, "lengths": lengths, "order": "bucket"}
    plan, later = Plan(1600, **settings), Plan(1600, epoch=1, **settings)
    buckets = [set((lengths[plan.batch(step)] // 100).tolist()) for step in range(plan.num_steps)]
    assert all(len(bucket) == 1 for bucket in buckets)  # 16 quantile buckets of 100 samples, five batches each
    order = [bucket.pop() for bucket in buckets]
    assert np.bincount(order).tolist() == [5] * 16
    assert order != sorted(order)
    batches = {frozenset(plan.batch(step).tolist()) for step in range(plan.num_steps)}
    assert batches.isdisjoint(frozenset(later.batch(step).tolist()) for step in range(later.num_steps))


def test_padding_is_counted_by_grain_and_bucket_has_less_than_random() -> None:
    lengths = np.random.default_rng(2).gamma(2.0, 5.0, 5000)
    settings = {"rule": BatchRule(64), "grains": 2, "seed": 0, "lengths": lengths}
    padding = {}
    for order in ("random", "bucket", "sorted"):
        plan = Plan(5000, order=order, **settings)
        grains = [lengths[grain] for step in range(plan.num_steps) for grain in plan.grains(step)]
        padded = sum(len(grain) * grain.max() for grain in grains)
        padding[order] = plan.padding()
        assert padding[order] == pytest.approx(1 - lengths.sum() / padded, abs=1e-12)
    assert padding["sorted"] < padding["bucket"] < padding["random"] / 3
    assert Plan(50, rule=BatchRule(8), grains=2, seed=0).padding() == 0


def brute_force_cut(lengths: list[float], num_grains: int) -> float:
    """Least cost of the costliest grain over all ways to cut the sorted lengths into grains of MIN_GRAIN or more."""
    descending = sorted(lengths, reverse=True)
    best = float("inf")
    for ends in itertools.combinations(range(1, len(descending)), num_grains - 1):
        pieces = [descending[start:end] for start, end in itertools.pairwise([0, *ends, len(descending)])]
        if min(map(len, pieces)) >= MIN_GRAIN:
            best = min(best, max(len(piece) * piece[0] for piece in pieces))
    return best


@quick
@given(st.lists(st.integers(0, 100) | st.floats(0, 1000), min_size=2, max_size=12), st.integers(1, 5))
def test_cut_is_as_good_as_brute_force(values: list[float], grains: int) -> None:
    lengths = np.array(values, dtype=float)
    pieces = cut(lengths, len(values), grains)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(values)))
    worst = max(len(piece) * lengths[piece].max() for piece in pieces)
    assert worst <= brute_force_cut(values, len(pieces)) * (1 + CUT_TOLERANCE) * (1 + 1e-12)
    for piece in pieces:
        assert lengths[piece[0]] == lengths[piece].max()


def test_cut_sets_outliers_apart_and_balances_the_others() -> None:
    lengths = np.array([1.0] * 60 + [1000.0, 900.0] + [500.0] * 2)
    sizes = [len(piece) for piece in cut(lengths, 64, 5)]
    assert sizes == [2, 2, 20, 20, 20]


def test_cut_ends_on_lengths_between_which_no_float_lies() -> None:
    pieces = cut(np.array([0.0, 0.0, 5e-324, 5e-324, 5e-324]), 5, 2)
    assert [piece.tolist() for piece in pieces] == [[2, 3, 4], [0, 1]]


@pytest.mark.parametrize("lengths", [None, np.full(23, 7.5)])
def test_cut_without_different_lengths_is_array_split(lengths: np.ndarray | None) -> None:
    for grains in range(1, 11):
        pieces = cut(lengths, 23, grains)
        expected = np.array_split(np.arange(23), grains)
        assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in expected]


def test_no_grain_is_a_lone_sample_unless_the_batch_is() -> None:
    assert [len(cut(None, num_samples, 4)) for num_samples in (0, 1, 2, 3, 4, 7, 8, 9)] == [0, 1, 1, 1, 2, 3, 4, 4]


@quick
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 4))
def test_assign_keeps_grahams_bound(costs: list[float], size: int) -> None:
    ranks = assign(costs, size)
    assert sorted(number for held in ranks for number in held) == list(range(len(costs)))
    assert all(held == sorted(held) for held in ranks)
    best = min(
        max(sum(cost for cost, rank in zip(costs, choice, strict=True) if rank == each) for each in range(size))
        for choice in itertools.product(range(size), repeat=len(costs))
    )
    largest = max(sum(costs[number] for number in held) for held in ranks)
    assert largest <= (4 / 3 - 1 / (3 * size)) * best + 1e-9


@pytest.mark.parametrize("cost", [0.0, 0.1, 32.0])
def test_assign_deals_equal_costs_in_turn(cost: float) -> None:
    assert assign([cost] * 10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert assign([cost] * 2, 4) == [[0], [1], [], []]


def test_ranks_without_a_grain_know_the_step_all_the_same() -> None:
    share = Plan(5, rule=BatchRule(100), grains=8, seed=0).share(0, 3, 4)
    assert (share.num_grains, share.numbers, share.grains, share.num_samples, share.count) == (2, (), (), 5, 5)


def test_counts_keep_their_kind() -> None:
    settings = {"rule": BatchRule(3), "grains": 1, "seed": 0, "order": "none"}
    whole = Plan(3, counts=np.array([200, 200, 200], dtype=np.uint8), **settings).count(0)
    real = Plan(3, counts=np.array([0.5, 0.25, 2], dtype=np.float16), **settings).count(0)
    assert (whole, type(whole), real, type(real)) == (600, int, 2.75, float)


def test_a_cost_that_only_just_fits_is_not_lost_to_rounding() -> None:
    plan = Plan(
        20, rule=BatchRule(1000, 1.0), grains=1, seed=0, lengths=np.full(20, 0.1), order="none"
    )  # 10 x 0.1 is 1.0, yet 1.0 // 0.1 is 9
    assert [len(plan.batch(step)) for step in range(plan.num_steps)] == [10, 10]


def test_batches_by_cost_go_on_over_the_inner_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).gamma(3.0, 4.0, 500)
    settings = {"rule": BatchRule(40, 200.0), "grains": 2, "seed": 0, "lengths": lengths}
    whole = Plan(500, **settings)
    monkeypatch.setattr("paceline.data.plan._CHUNK", 7)
    chunked = Plan(500, **settings)
    assert [chunked.batch(step).tolist() for step in range(chunked.num_steps)] == [
        whole.batch(step).tolist() for step in range(whole.num_steps)
    ]


def test_a_step_outside_the_plan_is_refused() -> None:
    plan = Plan(10, rule=BatchRule(4), grains=2, seed=0)
    assert plan.num_steps == 3
    for step in (-1, 3):
        with pytest.raises(IndexError, match="3 steps"):
            plan.batch(step)


@pytest.mark.parametrize("order", ["sorted", "laplace", "bucket"])
def test_orders_by_length_need_lengths(order: str) -> None:
    with pytest.raises(LengthsNeeded, match=order) as caught:
        Plan(10, rule=BatchRule(4), grains=2, seed=0, order=order)
    assert "order: random" in caught.value.hint
    with pytest.raises(LengthsNeeded, match="batch_cost"):
        Plan(10, rule=BatchRule(4, 30.0), grains=2, seed=0)


@pytest.mark.parametrize("name", ["lengths", "counts"])
@pytest.mark.parametrize(
    ("values", "index"),
    [
        ([1.0, float("nan"), 2.0], 1),
        ([1.0, 2.0, -0.5], 2),
        ([1, -3, 2], 1),
        ([float("inf"), 1.0, 1.0], 0),
        ([1.0, 2.0], None),
        ([[1.0], [2.0], [3.0]], None),
        (["a", "b", "c"], None),
    ],
)
def test_numbers_that_make_no_sense_are_named(name: str, values: list[Any], index: int | None) -> None:
    with pytest.raises(BadSampleNumbers, match=name) as caught:
        Plan(3, rule=BatchRule(2), grains=1, seed=0, **{name: np.array(values)})
    assert caught.value.index == index
    assert isinstance(caught.value, PacelineError)
    assert name in caught.value.hint


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("num_samples", {"num_samples": 0}),
        ("grains", {"grains": 0}),
        ("order", {"order": "shuffled"}),
        ("bins", {"bins": 0}),
        ("partition_epoch", {"partition_epoch": 0}),
        ("partition_epoch", {"partition_epoch": 11}),
    ],
)
def test_settings_that_cannot_work_are_named(setting: str, changed: dict[str, Any]) -> None:
    with pytest.raises(BadPlanSetting, match=setting) as caught:
        Plan(**{"num_samples": 10, "rule": BatchRule(4), "grains": 2, "seed": 0, **changed})
    assert caught.value.value == changed[setting]
    assert caught.value.hint


def test_rules_that_cannot_work_are_named() -> None:
    with pytest.raises(BadPlanSetting, match="global_batch"):
        BatchRule(0)
    for max_cost in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadPlanSetting, match="batch_cost"):
            BatchRule(4, max_cost)


@quick
@given(
    st.integers(1, 80), st.integers(1, 30), st.integers(1, 5), st.sampled_from(("none", "random")), st.integers(0, 3)
)
def test_drop_last_leaves_out_only_a_batch_that_is_not_full(
    num_samples: int, size: int, grains: int, order: str, epoch: int
) -> None:
    named: dict[str, Any] = {"rule": BatchRule(size), "grains": grains, "seed": 7, "order": order, "epoch": epoch}
    if num_samples < size:
        with pytest.raises(BadPlanSetting, match="never full"):
            Plan(num_samples, drop_last=True, **named)
        return
    whole, full = Plan(num_samples, **named), Plan(num_samples, drop_last=True, **named)
    assert full.num_steps == num_samples // size
    for step in range(full.num_steps):
        assert full.batch(step).tolist() == whole.batch(step).tolist()
        assert len(full.batch(step)) == size
    assert {len(whole.batch(step)) for step in range(full.num_steps, whole.num_steps)} <= {num_samples % size}


# -- rules that follow each other --------------------------------------------------------------------------------------


def by_hand(order: list[int], lengths: Any, rules: list[tuple[int, BatchRule]]) -> list[list[int]]:
    """Batches of an order, sample by sample: each step takes what fits its rule, and longer samples stay in line."""
    line, batches = list(order), []
    while line:
        rule = [rule for first, rule in rules if first <= len(batches)][-1]
        batch: list[int] = []
        for sample in list(line):
            if rule.max_length is not None and lengths[sample] > rule.max_length:
                continue
            longest = max(lengths[each] for each in (*batch, sample))
            is_full = len(batch) == rule.max_samples
            if is_full or (rule.max_cost is not None and batch and longest * (len(batch) + 1) > rule.max_cost):
                break
            batch.append(sample)
            line.remove(sample)
        if not batch:
            break
        batches.append(batch)
    return batches


changing_rules = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.builds(BatchRule, st.integers(1, 12), st.none() | st.integers(20, 400), st.none() | st.integers(5, 60)),
    ),
    min_size=1,
    max_size=4,
)


@quick
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    changing_rules,
    st.sampled_from(("none", "random", "sorted", "laplace")),
    st.integers(0, 3),
)
def test_rules_that_follow_are_as_by_hand(lengths: list[int], drawn: Any, order: str, epoch: int) -> None:
    firsts = list(itertools.accumulate(step for step, _ in drawn))
    rules = [(0, drawn[0][1]), *((first, rule) for first, (_, rule) in zip(firsts, drawn[1:], strict=False))]
    named: dict[str, Any] = {"grains": 2, "seed": 3, "lengths": lengths, "order": order, "epoch": epoch}
    whole = samples(Plan(len(lengths), rule=BatchRule(1), **named))
    expected = by_hand(whole, lengths, rules)
    if not expected:
        with pytest.raises(BadPlanSetting, match="length_schedule"):
            Plan(len(lengths), rule=rules[0][1], changes=rules[1:], **named)
        return
    plan = Plan(len(lengths), rule=rules[0][1], changes=rules[1:], **named)
    assert [plan.batch(step).tolist() for step in range(plan.num_steps)] == expected
    assert plan.num_left_out == len(lengths) - sum(map(len, expected))
    assert [plan.count(step) for step in range(plan.num_steps)] == [len(batch) for batch in expected]
    for step in range(plan.num_steps):
        shares = [plan.share(step, rank, 2) for rank in range(2)]
        assert sorted(int(each) for share in shares for grain in share.grains for each in grain) == sorted(
            expected[step]
        )


@quick
@given(st.lists(st.integers(1, 60), min_size=8, max_size=60), st.integers(0, 3))
def test_buckets_under_rules_that_follow(lengths: list[int], epoch: int) -> None:
    """Every sample once where the last rule takes all, batches of one bucket, and each rule's own size."""
    rules = [(0, BatchRule(2, max_length=30)), (2, BatchRule(3))]
    if min(lengths) > 30:
        return
    named: dict[str, Any] = {"grains": 1, "seed": 5, "lengths": lengths, "order": "bucket", "bins": 3, "epoch": epoch}
    plan = Plan(len(lengths), rule=rules[0][1], changes=rules[1:], **named)
    batches = [plan.batch(step).tolist() for step in range(plan.num_steps)]
    assert all(lengths[each] <= 30 for batch in batches[:2] for each in batch)
    assert all(len(batch) <= 2 for batch in batches[:2])
    num_short = sum(length <= 30 for length in lengths)
    if -(-num_short // 2) >= 2:
        assert sorted(each for batch in batches for each in batch) == list(range(len(lengths)))
        assert sum(len(batch) < 3 for batch in batches[2:]) <= 1


def test_one_rule_is_the_plan_of_before() -> None:
    """A change that is never reached leaves every batch as it was."""
    lengths = np.random.default_rng(1).integers(1, 50, 90)
    for order in ORDERS:
        named: dict[str, Any] = {"grains": 3, "seed": 2, "lengths": lengths, "order": order}
        plain = Plan(90, rule=BatchRule(8), **named)
        changed = Plan(90, rule=BatchRule(8), changes=[(1000, BatchRule(2))], **named)
        assert [each.tolist() for each in map(plain.batch, range(plain.num_steps))] == [
            each.tolist() for each in map(changed.batch, range(changed.num_steps))
        ]
