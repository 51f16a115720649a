from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.sum_tree import even_starts, layout
from paceline.lab.predict.cost import (
    GLOO,
    NCCL,
    Library,
    Place,
    all_gather,
    all_reduce,
    all_to_all,
    exact_scatter,
    exact_sum,
    reduce_scatter,
)
from paceline.lab.predict.links import LinkSpeed

FREE = Library(0.0, 0.0, has_trees=False, scatters=False, crowding=1.0)
"""Only links take time."""
LINK = LinkSpeed(1e8, 1e-3)
S = 8e6


def place(ranks: int, nodes: int | None = None, library: Library = FREE) -> Place:
    return Place(ranks, nodes or ranks, LinkSpeed(1e10, 1e-5), LINK, library)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_takes_the_textbook_time(ranks: int) -> None:
    rounds = ranks - 1
    assert all_reduce(place(ranks), S) == pytest.approx(2 * rounds * (1e-3 + S / ranks / 1e8))
    assert all_gather(place(ranks), S) == pytest.approx(rounds * (1e-3 + S / ranks / 1e8))
    assert all_to_all(place(ranks), S) == pytest.approx(1e-3 + rounds * S / ranks / 1e8)


def test_one_rank_sends_nothing() -> None:
    assert all_reduce(place(1), S) == all_gather(place(1), S) == all_to_all(place(1), S) == 0


def test_trees_are_for_small_sums_on_many_ranks() -> None:
    nccl = place(1024, library=replace(NCCL, call_s=0.0, message_s=0.0))
    assert all_reduce(nccl, 4) == pytest.approx(2 * 10 * 1e-3, rel=1e-3)
    assert all_reduce(nccl, 4) < all_reduce(place(1024), 4)


def test_a_sum_in_one_order_moves_the_bytes_of_a_ring() -> None:
    one_each = layout(even_starts(8, 8))
    quick = Place(8, 8, LINK, replace(LINK, latency_s=0.0), FREE)
    assert exact_sum(quick, S, one_each) == pytest.approx(all_reduce(quick, S))


def test_more_partial_sums_are_more_bytes() -> None:
    uneven = layout(even_starts(8, 3))
    assert max(uneven.rows) == 2
    assert exact_sum(place(3), S, uneven) > 1.3 * exact_sum(place(3), S, layout(even_starts(3, 3)))


def test_two_ranks_sum_as_the_library_does() -> None:
    plain = layout(even_starts(8, 2))
    assert exact_sum(place(2), S, plain) == all_reduce(place(2), S)
    assert exact_scatter(place(2), S, plain) == reduce_scatter(place(2), S)


def test_ranks_of_one_machine_share_its_way_out() -> None:
    """In a ring one rank of each machine sends to another machine; in an all-to-all every rank does."""
    assert all_gather(place(8, 2), S) == pytest.approx(7 * 1e-3 + 7 / 8 * S / 1e8)
    assert all_to_all(place(8, 2), S) == pytest.approx(1e-3 + 4 * 4 / 8 * S / 1e8)


def test_gloo_scatters_by_an_all_reduce() -> None:
    assert reduce_scatter(place(4, library=GLOO), S) == all_reduce(place(4, library=GLOO), S)
    assert reduce_scatter(place(4, library=NCCL), S) == all_gather(place(4, library=NCCL), S)


def test_two_ranks_of_gloo_send_in_turn_more_often_than_not() -> None:
    pair = replace(FREE, crowding=1.4, pair_crowding=1.5, pair_gather=1.15)
    assert (GLOO.pair_crowding, GLOO.pair_gather, NCCL.pair_crowding, NCCL.pair_gather) == (1.5, 1.15, 1.0, 1.0)
    assert all_to_all(place(2, library=pair), S) == pytest.approx(1e-3 + 1.5 * S / 2 / 1e8)
    assert all_gather(place(2, library=pair), S) == pytest.approx(1e-3 + 1.15 * S / 2 / 1e8)
    assert all_reduce(place(2, library=pair), S) == all_reduce(place(2), S)
    assert all_gather(place(4, library=pair), S) == all_gather(place(4), S)
    assert all_to_all(place(4, library=pair), S) == pytest.approx(1e-3 + 1.4 * 3 * S / 4 / 1e8)


def test_exact_sums_of_gloo_are_messages_between_two_ranks() -> None:
    """Both hops, with a factor of their own, which an all-to-all of the library does not have."""
    direct = replace(FREE, crowding=1.4, pair_crowding=1.5, pair_gather=1.15, direct=1.3, pair_direct=1.1)
    one_each, two_each = layout((0, 1, 2, 3, 4)), layout((0, 6, 12))
    assert exact_sum(place(4, library=direct), S, one_each) == pytest.approx(2 * (1e-3 + 1.3 * 3 * S / 4 / 1e8))
    assert exact_sum(place(2, library=direct), S, two_each) == pytest.approx(2e-3 + 1.1 * 3 * S / 2 / 1e8)
    assert exact_scatter(place(2, library=direct), S, two_each) == pytest.approx(1e-3 + 1.1 * 2 * S / 2 / 1e8)
    assert all_to_all(place(4, library=direct), S) == pytest.approx(1e-3 + 1.4 * 3 * S / 4 / 1e8)
