from __future__ import annotations

import pickle
import sys
import traceback

import pytest

from paceline.core.errors import PacelineError, first_line


class Odd(PacelineError):
    def __init__(self, number: int, *, why: str) -> None:
        super().__init__(f"{number} is odd: {why}")
        self.number = number
        self.hint = f"try {number + 1}"


def test_errors_travel_between_processes_whatever_they_are_made_of() -> None:
    error = pickle.loads(pickle.dumps(Odd(3, why="it is")))
    assert (type(error), str(error), error.hint, error.number) == (Odd, "3 is odd: it is", "try 4", 3)


def test_first_line() -> None:
    assert first_line(ValueError("\nso it is\nand so on")) == "ValueError: so it is"
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks have no notes before Python 3.11")
def test_a_traceback_has_the_hint_and_notes_of_others() -> None:
    error = Odd(3, why="it is")
    error.add_note("seen by a test")
    again = pickle.loads(pickle.dumps(error))
    lines = traceback.format_exception_only(again)
    assert [line.rstrip() for line in lines][-3:] == [
        "tests.core.test_errors.Odd: 3 is odd: it is",
        "  try 4",
        "seen by a test",
    ]
