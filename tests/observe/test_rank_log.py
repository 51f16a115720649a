"""A rank's own file has what it said, its warnings and its end, and leaves nothing behind."""

from __future__ import annotations

import io
import logging
import os
import warnings
from pathlib import Path

import pytest

from paceline.observe.progress import Progress
from paceline.observe.rank_log import rank_log


def test_all_that_a_rank_has_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs" / "rank-1.log"
    shown = warnings.showwarning

    def speak() -> None:
        with rank_log(path, "rank 1 of 2, cpu, 1 thread"):
            Progress(enabled=False).say("resumed after step 4")
            logging.getLogger("paceline.data").info("12 files")
            logging.getLogger("elsewhere").error("not ours")
            warnings.warn("rather slow", stacklevel=1)
            _ = 1 // 0

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            speak()

    with pytest.warns(UserWarning, match="rather slow"):
        fail()
    lines = path.read_text().splitlines()
    assert f"pid {os.getpid()}, rank 1 of 2, cpu, 1 thread" in lines[0]
    assert lines[1].endswith("INFO resumed after step 4")
    assert lines[2].endswith("INFO 12 files")
    assert "UserWarning: rather slow" in lines[3]
    assert "ERROR ended by an exception" in "".join(lines)
    assert lines[-1] == "ZeroDivisionError: integer division or modulo by zero"
    assert not any("not ours" in line for line in lines)
    assert capsys.readouterr().out == ""
    assert warnings.showwarning is shown
    assert not logging.getLogger("paceline").handlers


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    for launch in ("first", "second"):
        with rank_log(path, launch):
            pass
    assert [line.rpartition(" ")[2] for line in path.read_text().splitlines()] == ["first", "second"]


def test_what_is_said_is_not_said_twice(tmp_path: Path) -> None:
    """A user's own logging set-up gets our log, but not the console over again."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger().addHandler(handler)
    with rank_log(tmp_path / "rank-0.log", "header"):
        Progress(enabled=False).say("hello")
        logging.getLogger("paceline.data").info("12 files")
    logging.getLogger().removeHandler(handler)
    assert written.getvalue().splitlines()[1:] == ["12 files"]
    assert (tmp_path / "rank-0.log").read_text().count("hello") == 1


def test_without_a_file_nothing_is_changed() -> None:
    shown = warnings.showwarning
    with rank_log(None, "header"):
        assert warnings.showwarning is shown
        assert not logging.getLogger("paceline").handlers


def test_a_full_disk_is_no_reason_to_fail_or_to_fill_the_console(capfd: pytest.CaptureFixture[str]) -> None:
    with rank_log(Path("/dev/full"), "rank 1 of 2"):
        logging.getLogger("paceline.data").info("12 files")
    with pytest.raises(ZeroDivisionError), rank_log(Path("/dev/full"), "rank 1 of 2"):
        _ = 1 // 0
    assert capfd.readouterr().err == ""
