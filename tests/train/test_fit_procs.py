"""`fit(..., procs=2)`: from a notebook, with a task that is defined in it, and from a script."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
from tools.chaos.processes import fork_ranks

import paceline
from paceline.core.errors import Conflict
from paceline.core.run_folder import RunExists
from paceline.train import fit_procs
from paceline.train.fit import fit
from paceline.train.fit_procs import RanksFailed, TaskNotPortable
from paceline.train.loss import LossContract
from tests.commands import run_command
from tests.crash import _context
from tests.train.small import SmallTask

CELLS = (
    """
import json, torch, paceline
class Line(paceline.Task):
    class Settings(paceline.TrainConfig):
        hidden: int = 3
    def __init__(self, scale=1.0):
        self.scale = scale
    def model(self):
        return Net(self.settings.hidden)
    def train_data(self):
        x = torch.arange(32, dtype=torch.float32).reshape(8, 4) / 32
        return torch.utils.data.TensorDataset(x, x.sum(1))
    def loss(self, model, grain):
        return (model(grain.x) - self.scale * grain.y).square().sum(), len(grain)
class Net(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = torch.nn.Linear(4, hidden)
        self.head = torch.nn.Linear(hidden, 1)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).squeeze(1)
given = dict(steps=6, global_batch=4, grains=2, lr=0.1, device="cpu", progress="none", hidden=5, loggers=())
""",
    """
class Seen(paceline.Callback):
    def __init__(self):
        self.losses = []
    def start(self, info):
        self.info, self.file = info, open("/dev/null", "w")
    def step(self, records):
        self.losses += [record["loss"] for record in records]
task, seen = Line(scale=2.0), Seen()
both = paceline.fit(task, procs=2, out=FOLDER, watchers=[seen], **given)
alone = paceline.fit(task, **given)
print("RESULT", json.dumps({
    "status": both.status,
    "same": all(map(torch.equal, both.model.state_dict().values(), alone.model.state_dict().values())),
    "own class": type(both.model) is Net,
    "ranks": len(list((both.folder / "logs").glob("rank-*.log"))),
    "seen": len(seen.losses), "last": seen.losses[-1:] == [both.loss], "open": "file" in vars(seen),
}))
""",
)


def test_a_task_of_a_notebook_on_two_processes(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook()
    cells = [cell.replace("FOLDER", repr(str(tmp_path / "run"))) for cell in CELLS]
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the client, about event loops
        client = nbclient.NotebookClient(notebook, timeout=180, kernel_name="python3")
        asyncio.run(client.async_execute())
    printed = "".join(output.get("text", "") for output in notebook.cells[1]["outputs"])
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT")]
    expected = {"status": "finished", "same": True, "own class": True, "ranks": 2}
    expected |= {"seen": 6, "last": True, "open": False}  # what watchers saw comes back, their open files do not
    assert json.loads(line.removeprefix("RESULT ")) == expected


class InterruptedTask(SmallTask):
    """Its model cannot be pickled; and the process that started the ranks gets a Ctrl-C."""

    def model(self):
        model = super().model()
        model.lock = threading.Lock()
        return model

    def after_step(self, model, step, grains):
        if self.world.rank == 0 and step.number == 2:
            os.kill(os.getppid(), signal.SIGINT)


def fit_into(folder: str) -> None:
    """A script whose ranks are forked."""
    fork_ranks()
    with pytest.raises(RunExists, match="holds a run already"):
        fit(SmallTask(), procs=2, steps=1, device="cpu", out=folder, progress="none")
    # Ctrl-C saves and returns, as in one process; and what was trained is not lost because the model cannot travel.
    result = fit(InterruptedTask(), procs=2, epochs=1000, device="cpu", out=f"{folder}-2", progress="none")
    assert (result.status, result.model) == ("stopped", None)
    assert result.checkpoint is not None


def test_an_error_of_the_ranks_is_one_of_the_caller(tmp_path):
    fit(SmallTask(), steps=1, device="cpu", out=tmp_path / "run", progress="none")
    process = _context().Process(target=fit_into, args=(str(tmp_path / "run"),))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_cannot_travel_is_said():
    task = SmallTask()
    task.lock = threading.Lock()
    with pytest.raises(TaskNotPortable, match="cannot be pickled: TypeError: .*lock"):
        fit(task, procs=2, steps=1, device="cpu")


@pytest.mark.parametrize("procs", [0, -1, "two", 1.5])
def test_a_number_of_ranks_that_is_none_is_refused(procs):
    with pytest.raises(paceline.PacelineError, match="not a number of ranks"):
        fit(SmallTask(), procs=procs, steps=1, device="cpu")


def test_another_thread_cannot_start_ranks():
    raised = []

    def call():
        try:
            fit(SmallTask(), procs=2, steps=1, device="cpu")
        except paceline.PacelineError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(raised[0], Conflict)
    assert "not the main thread" in str(raised[0])


def test_ranks_of_a_launcher_stay_what_they_are(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Conflict, match="has started 1 rank on this machine already"):
        fit(SmallTask(), procs=2, steps=1, device="cpu")


def test_one_process_is_this_one():
    task = SmallTask()
    assert fit(task, procs="auto", steps=1, device="cpu").num_steps == 1
    assert task.seen  # no copy


def test_memory_of_a_rank_is_no_place_for_a_run() -> None:
    """The run was `finished` and delivered, and gone with the process of its first rank."""
    pytest.importorskip("fsspec")
    with pytest.raises(paceline.PacelineError, match="memory://bucket/run is memory of one process") as refused:
        fit(SmallTask(), epochs=1, procs=2, out="memory://bucket/run")
    assert "without `procs`" in refused.value.hint
    words = ["train", "digits", "--epochs", "1", "--procs", "2", "--out", "memory://bucket/run"]
    answer = run_command(words)
    assert (answer.code, "is memory of one process" in answer.err) == (2, True)


class Buggy(SmallTask):
    def loss(self, model, grain):
        raise ValueError("a bug of mine")


class Misread(SmallTask):
    def loss(self, model, grain):
        return model(grain.x).mean()


class Crowded(SmallTask):
    """Its error holds a generator, which cannot be pickled."""

    def optimizer(self, groups, settings, device):
        return (group for group in groups)


@pytest.mark.parametrize(
    ("task", "kind", "message"),
    [
        (Buggy(), RanksFailed, r"\(procs=2\) failed: ValueError: a bug of mine"),
        (Misread(), LossContract, "a mean"),
        (Crowded(), paceline.PacelineError, "`optimizer` of task Crowded returned generator"),
    ],
)
def test_an_error_of_a_rank_says_what_it_is(task, kind, message, monkeypatch):
    """An error of the task's was `its ranks ended with exit code 1`."""

    words = list(sys.argv)

    def one_rank(number, command, *, device):
        monkeypatch.setattr(sys, "argv", ["fit_procs.py", command[-1]])
        with pytest.raises((ValueError, paceline.PacelineError)):
            fit_procs.work(Path(command[-1]))
        with pytest.raises((ValueError, paceline.PacelineError)):  # another rank's, later
            fit_procs.work(Path(command[-1]))
        assert sys.argv == words  # of the script, which its tasks may read, and which the run records
        return 1

    monkeypatch.setattr(fit_procs, "launch", one_rank)
    with pytest.raises(kind, match=message):
        fit(task, procs=2, steps=1, device="cpu", progress="none")
