from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

from paceline.train.feed import DataChanged, RanksDiffer, check_ranks
from paceline.world.link import Link
from tests.ranks import ranks
from tests.train.small import SmallTask, points, trainer


def test_the_message_names_the_rank() -> None:
    check_ranks([(5, "a"), (5, "a")])
    with pytest.raises(RanksDiffer, match="5 samples on rank 0, 4 samples on rank 2"):
        check_ranks([(5, "a"), (5, "a"), (4, "b")])
    with pytest.raises(RanksDiffer, match="of the same size, but not the same"):
        check_ranks([(5, "a"), (5, "b")])


class Uneven(SmallTask):
    def train_data(self) -> Any:
        return points(20 - self.world.rank, seed=1)


@ranks(2)
def test_ranks_with_other_data_are_refused(link: Link) -> None:
    with pytest.raises(RanksDiffer, match="20 samples on rank 0, 19 samples on rank 1"):
        trainer(Uneven(), None, link=link, epochs=1).fit()


class Shorter(SmallTask):
    def train_data(self) -> TensorDataset:
        return points(16, seed=1)


def test_a_run_is_not_resumed_on_other_data_unless_allowed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainer(SmallTask(), out, steps=2, epochs=2).fit()
    with pytest.raises(DataChanged, match="not what it was"):
        trainer(Shorter(), out, resume="auto", epochs=2, steps=4).fit()
    assert trainer(Shorter(), out, resume="auto", epochs=2, steps=4, allow_change=True).fit().num_steps == 4
