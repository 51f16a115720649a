"""A session opens its run folder completely or leaves it as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.settings import TrainConfig
from paceline.core.cloud.store import StoreFailed
from paceline.core.run_folder import RunBusy, RunChanged, RunExists, RunFolder, read_record
from paceline.train.checkpoint.session import RunSession
from paceline.world.discover.environment import World
from paceline.world.link import Link
from tests.shelf import Shelf

ALONE = Link(World(0, 0, 1, 1, 0, 1, "plain", None), torch.device("cpu"), 1, ("here",))


def session(out: Path | str, *, is_reopened: bool = False, **settings: Any) -> RunSession:
    config = TrainConfig(**{"epochs": 1, "out": out, "device": "cpu", "resume": "auto", **settings})
    return RunSession(config, ALONE, lambda line: None, "Points", is_reopened=is_reopened)


def is_free(folder: Path) -> bool:
    try:
        RunFolder(folder).check_free()
    except RunBusy:
        return False
    return True


def test_a_session_that_is_not_opened_writes_nothing(tmp_path: Path) -> None:
    session(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_open_session_holds_the_lock_and_a_closed_one_records_its_status(tmp_path: Path) -> None:
    run = session(tmp_path / "run")
    run.open()
    assert not is_free(tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert (record.status, record.grains, record.settings["sums"]) == ("running", 1, "exact")
    run.close("finished")
    assert is_free(tmp_path / "run")
    assert read_record(tmp_path / "run").status == "finished"
    run.fail()
    assert read_record(tmp_path / "run").status == "finished", "a session ends once"
    with pytest.raises(RunExists):
        session(tmp_path / "run", resume="no")


def test_a_failed_session_records_it_and_a_suspended_one_leaves_the_record(tmp_path: Path) -> None:
    run = session(tmp_path / "run")
    run.open()
    run.suspend()
    assert is_free(tmp_path / "run")
    assert read_record(tmp_path / "run").status == "running"
    again = session(tmp_path / "run", is_reopened=True)
    again.open()
    assert len(read_record(tmp_path / "run").starts) == 1, "one launch is one start"
    again.fail("diverged")
    assert read_record(tmp_path / "run").status == "diverged"
    assert is_free(tmp_path / "run")


def test_a_choice_is_recorded_at_once_and_found_again(tmp_path: Path) -> None:
    run = session(tmp_path / "run")
    run.open()
    run.keep_choice({"way": "plain"})
    assert read_record(tmp_path / "run").choice == {"way": "plain"}
    run.close("stopped")
    assert session(tmp_path / "run").choice == {"way": "plain"}


def test_a_start_that_another_one_overtook_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    late = session(tmp_path / "run")
    first = session(tmp_path / "run")
    first.open()
    with pytest.raises(RunBusy):
        late.open()
    first.close("stopped")
    written = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(RunChanged):
        late.open()
    assert (tmp_path / "run" / "run.json").read_bytes() == written
    assert is_free(tmp_path / "run")


def test_a_store_that_cannot_be_written_to_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELF", str(tmp_path / "shelf"))
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "copies"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    Shelf.faults, Shelf.log, Shelf.kills_at = [], [], 0
    run = session("shelf://run")
    assert run.address == "shelf://run"
    Shelf.faults = [("run.json", "error")] * 9
    try:
        with pytest.raises(StoreFailed):
            run.open()
    finally:
        Shelf.faults = []
    copy = tmp_path / "copies" / "shelf" / "run"
    assert is_free(copy)
    assert read_record(copy).status == "failed"
    assert not list((tmp_path / "shelf").rglob("run.json"))
