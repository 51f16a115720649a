"""The roll call, with threads as ranks and a store in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from paceline.core.errors import PacelineError
from paceline.world.roll_call import DuplicateRank, Present, RanksMissing, roll_call


def entry(rank: int, pid: int = 100) -> Present:
    return Present(rank, f"node{rank // 2}", pid + rank, "cpu", (0, 1))


def call(ranks: list[int], size: int, timeout_s: float) -> list[list[Present] | PacelineError]:
    store = HashStore()

    def one(rank: int) -> list[Present] | PacelineError:
        try:
            return roll_call(store, entry(rank), size, timeout_s)
        except PacelineError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_ranks_get_the_whole_roll() -> None:
    assert call([3, 1, 0, 2], 4, 30.0) == [[entry(rank) for rank in range(4)]] * 4


@pytest.mark.parametrize("here", [[0, 1, 4], [1, 4]])
def test_every_rank_names_the_missing(here: list[int]) -> None:
    missing = tuple(sorted(set(range(6)) - set(here)))
    for error in call(here, 6, 0.3):
        assert isinstance(error, RanksMissing)
        assert error.missing == missing
        assert [present.rank for present in error.present] == here
    assert "node2: 4" in str(error)
    assert ("2-3, 5" if 0 in here else "0, 2-3, 5") in str(error)


def test_a_rank_that_comes_too_late_hears_the_same() -> None:
    store = HashStore()
    with pytest.raises(RanksMissing):
        roll_call(store, entry(0), 2, 0.05)
    with pytest.raises(RanksMissing, match="rank 1"):
        roll_call(store, entry(1), 2, 30.0)


def test_a_second_process_with_the_same_rank_is_refused() -> None:
    store = HashStore()
    assert roll_call(store, entry(0), 1, 1.0) == [entry(0)]
    with pytest.raises(DuplicateRank, match=r"(?s)rank 0.*pid 100.*pid 7"):
        roll_call(store, entry(0, pid=7), 1, 1.0)
