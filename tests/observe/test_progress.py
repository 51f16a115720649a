"""What a person sees: a bar where one can be drawn, plain lines elsewhere, never both, and the terminal given back."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.observe import progress
from paceline.observe.progress import Progress, Whole, choose_style, clock_time, epoch_line, pace, setup_note
from tests.observe.notebook import fake_ipython

LONG = "stage digits 4-5 (3 of 5), epoch 2 of 400"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Time:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return shown


def on_file(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    return shown


@pytest.mark.parametrize(
    ("asked", "is_terminal", "in_notebook", "style"),
    [
        ("auto", True, False, "bar"),
        ("auto", False, False, "lines"),
        ("auto", False, True, "notebook"),
        ("bar", False, False, "bar"),
        ("bar", False, True, "notebook"),
        ("lines", True, False, "lines"),
        ("lines", False, True, "lines"),
        ("none", True, True, "none"),
    ],
)
def test_the_style(asked: str, is_terminal: bool, in_notebook: bool, style: str) -> None:
    assert choose_style(asked, is_terminal=is_terminal, is_notebook=in_notebook) == style


def test_the_epoch_line_is_that_of_returnn_with_padding_and_speed() -> None:
    line = epoch_line("epoch 1", 2941, 1738.9, 0.993, loss=0.12341, padding=0.031, speeds=["812 samples/s"])
    assert line == (
        "train epoch 1, finished after 2941 steps, 0:28:58 elapsed (99.3% computing time),"
        " loss 0.1234, padding 3.1%, 812 samples/s"
    )


def test_the_epoch_line_leaves_out_what_is_not_known() -> None:
    line = epoch_line("stage b, epoch 12", 3, 36_061.0, 1.0, loss=2.0, padding=None, speeds=["0.0312 samples/s"])
    assert line == (
        "train stage b, epoch 12, finished after 3 steps, 10:01:01 elapsed (100.0% computing time),"
        " loss 2.0000, 0.0312 samples/s"
    )


def phrase(*numbers: Any) -> str:
    return ", ".join(word.text for word in pace(*numbers))


def test_pace() -> None:
    assert phrase(30, 90, 1.5, 0.001, 2.0, 0) == "loss 1.5000, lr 0.001, 2 it/s, 0:00:30 left in the epoch"
    whole = Whole(0.9999, 8073.0)
    assert phrase(30, 90, 1.5, None, 2.0, 0, whole) == "loss 1.5000, 2 it/s, 99.9% of the run, 2:14:33 left"
    assert phrase(30, None, 1.5, None, 1234.5, 7) == "loss 1.5000, 1234 it/s, 7 skipped"
    assert clock_time(59.9) == "0:00:59"


def test_a_launcher_s_terminal_is_not_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's ranks print to a terminal of their own, also where mpirun prints to a file."""
    terminal = on_terminal(monkeypatch)
    clock = Time(monkeypatch)
    for asked, is_drawn in (("auto", False), ("bar", True)):
        shown = Progress(asked=asked, is_relayed=True)
        shown.epoch("epoch 1", 100, 0)
        clock.now += 11.0
        shown.step(20, 0.5, 0.1, 0)
        shown.close()
        assert ("\x1b" in terminal.getvalue()) == is_drawn


def test_plain_lines_come_at_most_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = on_file(monkeypatch)
    clock = Time(monkeypatch)
    shown = Progress()
    shown.epoch("epoch 2", 100, 10)
    for step in range(11, 61):  # one second each
        clock.now += 1.0
        shown.step(step, 0.5, 0.1, 0)
    shown.close()
    lines = plain.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == "epoch 2, step 20/100, loss 0.5000, lr 0.1, 1 it/s, 0:01:20 left in the epoch"
    assert lines[-1].startswith("epoch 2, step 60/100")


def test_a_bar_shows_where_the_epoch_is_and_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    clock = Time(monkeypatch)
    shown = Progress()
    assert HIDE_CURSOR not in terminal.getvalue(), "a run that cannot begin leaves the terminal as it was"
    shown.epoch("epoch 1", 4, 0)
    clock.now += 1.0
    shown.step(2, 0.25, 0.1, 0)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "epoch 1" in drawn
    assert "2/4" in drawn
    assert "loss 0.2500, lr 0.1, 2 it/s, 0:00:01 left" in drawn
    assert HIDE_CURSOR in terminal.getvalue()
    assert max(len(line) for line in re.split(r"[\r\n]", drawn)) <= 100
    shown.close()
    assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)
    shown.say("afterwards")
    assert terminal.getvalue().endswith("afterwards\n")


def test_a_bar_is_drawn_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    clock = Time(monkeypatch)
    shown = Progress()
    shown.epoch("epoch 1", 1000, 0)
    before = len(terminal.getvalue())
    for step in range(100):  # a thousand steps a second
        clock.now += 0.001
        shown.step(step, 0.25, 0.1, 0)
    assert len(terminal.getvalue()) == before
    shown.close()


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    clock = Time(monkeypatch)
    shown = Progress(enabled=False)
    shown.say("hello")
    shown.table([("a", "b")])
    shown.epoch("epoch 1", 4, 0)
    clock.now += 100.0
    shown.step(2, 0.25, 0.1, 0)
    shown.validation({"dev/loss": 1.0})
    shown.close()
    assert terminal.getvalue() == ""


def test_none_shows_only_what_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    clock = Time(monkeypatch)
    shown = Progress(asked="none")
    shown.table([("a", "b")])
    shown.epoch("epoch 1", 4, 0)
    clock.now += 100.0
    shown.step(2, 0.25, 0.1, 0)
    shown.validation({"dev/loss": 1.0})
    shown.say("numerics change from here on")
    shown.close()
    assert terminal.getvalue() == "numerics change from here on\n"


def test_a_notebook_has_one_line_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = on_file(monkeypatch)
    cell = fake_ipython(monkeypatch, SimpleNamespace(kernel=object()))
    clock = Time(monkeypatch)
    shown = Progress()
    for epoch in (1, 2):
        shown.epoch(f"epoch {epoch}", 4, 0)
        clock.now += 1.0
        shown.step(2, 0.25, 0.1, 0)
    (line,) = cell.outputs
    assert (
        line["text/plain"] == "epoch 2 ██████████░░░░░░░░░░ 2/4 loss 0.2500, lr 0.1, 2 it/s, 0:00:01 left in the epoch"
    )
    shown.say("train epoch 1, finished")
    assert plain.getvalue() == "train epoch 1, finished\n", "lines are the cell's text, without codes for a terminal"
    shown.close()
    assert cell.outputs == [{"text/plain": "", "text/html": ""}]


def drawn(monkeypatch: pytest.MonkeyPatch, title: str, columns: int) -> str:
    """The last line that a bar of a long run shows at a width, without codes."""
    terminal, clock = on_terminal(monkeypatch), Time(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = Progress()
    shown.epoch(title, 2941, 0)
    clock.now += 1.0
    shown.step(1200, 2.34567, 0.003, 0, Whole(0.125, 4800.0))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    shown.close()
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]


@pytest.mark.parametrize(
    ("title", "columns", "words"),
    [
        (LONG, 200, "loss 2.3457, lr 0.003, 1200 it/s, 12.5% of the run, 1:20:00 left"),
        (LONG, 110, "loss 2.3457, 12.5% of the run, 1:20:00 left"),
        (LONG, 80, "loss 2.3457"),
        (LONG, 40, "loss 2.3457"),
        ("epoch 2 of 400", 120, "loss 2.3457, lr 0.003, 1200 it/s, 12.5% of the run, 1:20:00 left"),
        ("epoch 2 of 400", 80, "loss 2.3457, 12.5% of the run, 1:20:00 left"),
        ("epoch 2 of 400", 60, "loss 2.3457, 1:20:00 left"),
    ],
)
def test_a_narrow_terminal_keeps_bar_counts_and_loss(
    monkeypatch: pytest.MonkeyPatch, title: str, columns: int, words: str
) -> None:
    line = drawn(monkeypatch, title, columns)
    assert len(line.rstrip()) <= columns
    assert line.rstrip().endswith(words)
    assert "1200/2941" in line
    assert line.count("━") + line.count("╸") >= 3


def test_the_set_up_shows_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    time, shown = Time(monkeypatch), on_file(monkeypatch)
    show = Progress(asked="lines").countdown("compiling kernels")
    show(0, 40)
    for done, now in ((1, 101.0), (10, 104.0), (11, 105.0), (20, 108.0), (40, 120.0)):
        time.now = now
        show(done, 40)
    assert shown.getvalue().splitlines() == [
        "  compiling kernels: 10 of 40, 0:00:12 left",
        "  compiling kernels: 20 of 40, 0:00:08 left",
    ]
    assert setup_note(0, 40, 3.0) == ""


def test_the_bar_of_the_set_up_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    Time(monkeypatch)
    shown = on_terminal(monkeypatch)
    show = Progress().countdown("recording CUDA graphs")
    show(1, 2)
    assert "recording CUDA graphs" in shown.getvalue()
    show(2, 2)
    assert SHOW_CURSOR in shown.getvalue()
    quiet = Progress(asked="none").countdown("recording CUDA graphs")
    size = len(shown.getvalue())
    quiet(1, 2)
    assert len(shown.getvalue()) == size
