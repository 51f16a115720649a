from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.observe.journal import Journal, read
from paceline.observe.records import StepRecord
from paceline.train import survival as survival_module
from paceline.train.checkpoint.memory import MemoryState
from paceline.train.duties import NEVER, Moment
from paceline.train.position import Position
from paceline.train.survival import CopyKind, Survival, copy_kind, is_cut_loose, needs_all, price
from paceline.world.rounds import Lost, Member, Round

MEMBERS = (Member(0, 0, 0, "here"), Member(4, 1, 0, "there"))


def survival(**changes: Any) -> Survival:
    round_ = Round(**{"number": 2, "members": MEMBERS, "first_size": 2, "since": 0.0, **changes})
    return Survival(None, round_, MemoryState(), has_copies=True, newest_step=12)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "kind", "all_", "words"),
    [
        ({}, "whole", False, "go on from a copy in memory"),
        ({"shard": "full"}, "none", False, "newest checkpoint: weights are in pieces (`--shard`); `--mirror` keeps"),
        ({"shard": "full", "mirror": True}, "pieces", False, "each rank has its own and another's"),
        ({"shard": "node", "mirror": True}, "pieces", False, "each rank has its own and another's"),
        ({"reduce": "param", "sync_step": 4}, "none", False, "newest checkpoint: ranks step apart"),
        ({"reduce": "param", "sync_step": 4, "mirror": True}, "averages", False, "one of the last averages"),
        ({"reduce": "param", "sync_step": 4, "mirror": True, "sync_overlap": 1}, "none", False, "`--sync-overlap 0`"),
        ({"reduce": "param", "sync_step": 4, "sync_state": "keep"}, "none", True, "wait for its replacement"),
        ({"dataset_distribution": "random_seed_offset"}, "none", True, "wait for its replacement"),
        ({"sync_batchnorm": "all"}, "none", True, "wait for its replacement"),
    ],
)
def test_price_of_a_death(settings: dict[str, Any], kind: CopyKind, all_: bool, words: str) -> None:
    config = TrainConfig(epochs=1, **settings)
    assert (copy_kind(config), needs_all(config)) == (kind, all_)
    assert words in price(config)


def test_lines_of_a_round() -> None:
    assert survival(number=0).lines(0) == []
    lost = survival(lost=(Lost(1, "there", "ended by SIGKILL"),)).lines(10)
    assert len(lost) == 1
    assert lost[0].startswith("going on with 2 ranks after step 10: ")
    assert lost[0].endswith(" s lost, 2 steps repeated")
    assert survival(joined=(1,)).lines(12) == ["rank 1 on there joined: 2 ranks from step 12 on"]
    assert "`--min-ranks`" in survival(lost=(Lost(1, "there", "x"),), stops=True).lines(12)[-1]


def test_replicas_are_due_from_time_to_time_where_ranks_are_together() -> None:
    state = survival()
    state.start(40)
    now, before = Position(num_steps=41), Position(num_steps=40)
    assert state.next_due(before) == 41
    assert not state.is_due(before, Moment(before))
    assert state.is_due(now, Moment(before))
    assert not state.is_due(now, Moment(before, is_together=False))
    state.due_at = 60
    assert not state.is_due(now, Moment(before))
    assert state.is_due(now, Moment(before, regroups=True)), "another process waits to join"
    state.has_copies = False
    assert state.next_due(before) == NEVER


def test_journal_keeps_the_lines_on_ranks(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    journal = Journal(file)
    journal.step([StepRecord.line(step, 0, 1.0, 0.1, {}) for step in range(12)])
    journal.ranks(survival(lost=(Lost(1, "there", "ended by SIGKILL"),)).record(10, 0).to_json())
    journal.end("stopped")
    again = Journal(file, next_step=10)
    again.end("stopped")
    assert [record["step"] for record in read(file)] == list(range(10))
    (line,) = read(file, "ranks")
    assert (line["ranks"], line["step"], line["repeated"]) == (2, 9, 2)
    assert line["lost"] == [{"rank": 1, "host": "there", "why": "ended by SIGKILL"}]


def test_launcher_that_is_ending_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes with the end of its first thread, before the process has another parent: ranks of a machine
    whose launcher was killed asked all others to stop."""
    answers = iter([False, False, True])
    monkeypatch.setattr(survival_module, "is_orphan", lambda: next(answers))
    assert is_cut_loose(1)
    monkeypatch.setattr(survival_module, "is_orphan", lambda: False)
    assert not is_cut_loose(1)
    monkeypatch.setattr(survival_module, "is_orphan", lambda: True)
    assert not is_cut_loose(0)
