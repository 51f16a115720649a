"""Words of `paceline train` before the task is known."""

from __future__ import annotations

from paceline.config.train_command import take_task


def test_the_task_is_found_among_the_words() -> None:
    assert take_task(["--lr", "1", "digits"]) == ("digits", ["--lr", "1"])
    assert take_task(["--unknown", "3", "digits", "--lr", "1"]) == ("digits", ["--unknown", "3", "--lr", "1"])
    assert take_task(["--own-flag", "a.py:T"]) == ("a.py:T", ["--own-flag"])
    assert take_task(["--lr", "1", "--", "digits"]) == ("digits", ["--lr", "1"])
    assert take_task(["--exp-name", "digits"]) == (None, ["--exp-name", "digits"])
    assert take_task(["digts", "--lr", "1"]) == ("digts", ["--lr", "1"])
