"""The bar of a notebook: its line, and `paceline.fit` in a cell, of a real kernel and of one played by hand."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import paceline
from paceline.observe import progress
from paceline.observe.bars import MAX_BAR, MIN_BAR, NOTEBOOK_COLUMNS, Word, is_notebook, layout, notebook_line
from tests.observe.notebook import fake_ipython
from tests.train.small import SmallTask

CELL = """
import paceline
from tests.train.small import SmallTask
result = paceline.fit(SmallTask(), epochs=2, global_batch=8, log_every=1, device="cpu", level=0, workers=0)
result.status
"""


def test_a_cell_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = fake_ipython(monkeypatch, SimpleNamespace(kernel=object()))
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    result = paceline.fit(SmallTask(), epochs=2, global_batch=8, log_every=1, device="cpu", level=0, workers=0)
    assert result.status == "finished"
    assert cell.outputs == [{"text/plain": "", "text/html": ""}], "one display, empty when all is done"
    shown = [line["text/plain"] for line in cell.history]
    assert [line.split()[5] for line in shown[:8]] == [f"{done}/3" for _ in range(2) for done in range(4)]
    assert shown[0].startswith("epoch 1 ")
    assert shown[4].startswith("epoch 2 ")
    assert max(map(len, shown)) <= NOTEBOOK_COLUMNS
    lines = text.getvalue().splitlines()
    assert sum(line.startswith("train epoch") for line in lines) == 2
    assert "\x1b" not in text.getvalue(), "no codes for a terminal in a cell"


def test_a_cell_in_a_real_kernel() -> None:
    for package in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed: no real notebook here")
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    displays = [output for output in outputs if output.output_type == "display_data"]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert len(displays) == 1
    assert text.count("train epoch") == 2
    assert "\x1b" not in text
    assert outputs[-1].data["text/plain"] == "'finished'"


def test_a_terminal_of_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_notebook()
    fake_ipython(monkeypatch, None)
    assert not is_notebook()
    fake_ipython(monkeypatch, SimpleNamespace())
    assert not is_notebook()
    fake_ipython(monkeypatch, SimpleNamespace(kernel=object()))
    assert is_notebook()


@pytest.mark.parametrize(("done", "total"), [(0, 4), (3, 4), (4, 4), (7, None), (9, 4)])
def test_a_notebooks_line_fits(done: int, total: int | None) -> None:
    line = notebook_line("stage <first & only>, epoch 1", done, total, [Word("loss " + "9" * 100)])
    assert len(line) <= NOTEBOOK_COLUMNS
    assert line.count("█") + line.count("░") == MIN_BAR


@given(
    title=st.text(max_size=60),
    counts=st.text("0123456789/", min_size=3, max_size=20),
    words=st.lists(st.builds(Word, st.text(max_size=30), st.integers(0, 5)), max_size=6),
    width=st.integers(1, 200),
)
def test_a_line_gives_way(title: str, counts: str, words: list[Word], width: int) -> None:
    """The bar first, then words by their rank, then the title; what must stay may be too much, and only that."""
    line = layout(title, counts, words, width)
    assert MIN_BAR <= line.bar_width <= MAX_BAR
    needed = cell_len(line.title) + line.bar_width + cell_len(counts) + cell_len(line.note) + 3
    assert needed <= width or line.title == ""
    shown = [word for word in words if word.text in line.note]
    assert all(word in shown for word in words if word.rank == 0)
    if line.title != title.rstrip() and cell_len(line.title) < cell_len(title.rstrip()):
        assert line.note == ", ".join(word.text for word in words if word.rank == 0)
