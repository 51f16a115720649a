"""Where a rank is, in words, and who keeps whom waiting: without processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from paceline.world.failure import stacks
from paceline.world.failure.board import Failure, FailureBoard, Seen, describe, who_is_missing
from paceline.world.failure.flight_recorder import Trail, trail
from paceline.world.failure.watchdog import behind
from paceline.world.link import Link
from tests.ranks import ranks


def test_a_place_in_words() -> None:
    place = Trail()
    assert str(place) == "starting, before the first step, no collective yet"
    place.note("all_reduce", torch.zeros(2, 3, dtype=torch.bfloat16))
    place.doing, place.step = "training", 7
    assert str(place) == "training, step 7, collective 1 (all_reduce of 6 bfloat16)"
    place.note("barrier")
    assert str(place) == "training, step 7, collective 2 (barrier)"
    place.reset()
    assert str(place) == str(Trail())


@ranks(1, 2)
def test_every_collective_of_a_link_leaves_a_trace(link: Link) -> None:
    before, has_group = trail.number, link.world.size > 1
    link.all_reduce(torch.zeros(3))
    assert not has_group or str(trail).endswith(f"collective {before + 1} (all_reduce of 3 float32)")
    link.broadcast(torch.zeros(2, dtype=torch.int64))
    link.gather_objects(1)
    link.broadcast_object(1)
    link.barrier()
    assert trail.number - before == (5 if has_group else 0)


def test_who_is_behind() -> None:
    def at(number: int) -> Seen:
        return Seen("host", 1, number, "")

    assert behind(5, {0: at(5), 1: at(4), 2: None, 3: at(6)}) == [1]
    assert behind(0, {1: at(0)}) == []


def test_who_is_missing() -> None:
    def seen(beat: int, number: int) -> Seen:
        return Seen("host", beat, number, "")

    before = {1: seen(1, 4), 2: seen(1, 5), 3: seen(7, 4), 4: None}
    now = {1: seen(2, 4), 2: seen(3, 5), 3: seen(7, 4), 4: None}
    assert who_is_missing(5, before, now) == {1: True, 3: False, 4: False}  # 2 waits in vain, as the one who asks
    assert who_is_missing(5, before, {2: now[2]}) == {2: True}  # but it is the only one
    assert who_is_missing(5, {}, {2: now[2]}) == {2: False}  # seen once is not known to be alive


def test_what_the_report_says() -> None:
    board = FailureBoard(HashStore())
    assert board.last_seen(2) is None
    board.tell_place(2, Seen("n2", 4, 40, "training, step 2, collective 40 (barrier)"))
    stuck, dead = (describe(2, "n2", board.last_seen(2), is_alive) for is_alive in (True, False))
    assert stuck == (
        "rank 2 on n2 runs, but did not come (stuck?)\n"
        "  rank 2: last seen training, step 2, collective 40 (barrier)"
    )  # fmt: skip
    assert dead.startswith("rank 2 on n2 ended without a word")
    assert describe(1, None, None, is_alive=False).startswith("rank 1 ended without a word")
    lost = Failure(0, "n1", "lost", "RuntimeError: x", "trace", "training, step 3, collective 41 (barrier)", stuck)
    assert str(lost) == (
        f"trace\nrank 0 on n1 lost the other ranks: {stuck}\n"
        "  rank 0: training, step 3, collective 41 (barrier)\n"
        "  RuntimeError: x"
    )  # fmt: skip
    assert board.post(lost) == board.read() == lost


def test_stacks_go_into_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-1.log"
    waiting, done = threading.Event(), threading.Event()

    def somewhere_else() -> None:
        waiting.set()
        done.wait()

    thread = threading.Thread(target=somewhere_else)
    thread.start()
    waiting.wait()
    try:
        stacks.dump("nobody listens")
        assert not log.parent.exists()
        stacks.send_to(log)
        stacks.dump("rank 0 reported: it is over")
    finally:
        stacks.send_to(None)
        done.set()
        thread.join()
    text = log.read_text()
    assert "ERROR rank 0 reported: it is over; all threads were here:\n" in text
    assert "in somewhere_else" in text
    assert "in test_stacks_go_into_the_log" in text


@pytest.mark.parametrize("path", [None, Path("/proc/no such folder/rank-0.log")])
def test_a_log_that_cannot_be_written_keeps_nobody_from_ending(path: Path | None) -> None:
    stacks.send_to(path)
    stacks.dump("why")
    stacks.send_to(None)
