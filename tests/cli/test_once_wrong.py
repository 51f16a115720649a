"""Symptoms of commit ce01e4b, by the command line and by names that it had, too: this file runs there and fails.

To see that, lay it, tests/commands.py, tests/crash.py and tests/observe/report/written.py over a copy of that commit.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import paceline
from paceline.cli.main import main
from tests.commands import run_command
from tests.crash import command
from tests.observe.report.browser import look
from tests.observe.report.written import usual, write_run

TOKEN, PASSWORD = "hf_" + "aB3dE6gH9jK2mN5pQ8sT" * 2, "correct-horse-battery"
QUICK = ["--epochs", "1", "--device", "cpu", "--threads", "1", "--level", "0", "--progress", "none"]
TASK = '''
import os
import paceline
from tests.cli.tasks_for_tests import Good
from tests.cli.test_once_wrong import Endless

class Settings(paceline.TrainConfig):
    hf_token: str = ""
    """Key of a service."""
    source: str = ""

class Keyed(Good):
    Settings = Settings

class Stuck(Good):
    def train_data(self):
        return Endless(os.environ["PIDS"])
'''


class Endless:
    """Every worker reads its first sample for ever, and says who it is."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        (self._folder / str(os.getpid())).touch()
        time.sleep(600)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


def test_secrets_that_were_typed_are_in_no_file_of_the_run(tmp_path: Path, task: Path) -> None:
    """They were verbatim in `run.json`, which all could read, in the command and in the settings."""
    out = tmp_path / "runs" / "a"
    words = ["--hf-token", TOKEN, "--source", f"https://me:{PASSWORD}@host/data", "--out", str(out)]
    done = run_command(["train", f"{task}:Keyed", *QUICK, *words])
    assert done.code == 0, done.err
    shown = [done.out + done.err]
    for asked in (["runs", str(tmp_path / "runs"), "--json"], ["diff", str(out), str(out)], ["report", str(out)]):
        answer = run_command(asked)
        assert answer.code == 0, answer.err
        shown.append(answer.out + answer.err)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {"run.json", "metrics.jsonl", "report.html"} <= {path.name for path in files}
    for text in [*(path.read_bytes().decode("utf-8", "replace") for path in files), *shown]:
        assert TOKEN not in text
        assert PASSWORD not in text
    record = json.loads((out / "run.json").read_text())
    assert record["settings"]["hf_token"] == "********"
    assert "--hf-token" in record["starts"][0]["command"], "the rest of the command is there"
    assert not (out / "run.json").stat().st_mode & stat.S_IROTH, "others need not read it"
    # The masked value is no change of settings: the run goes on with the same words.
    again = run_command(["train", f"{task}:Keyed", *QUICK, *words, "--resume", "auto"])
    assert again.code == 0, again.err


def test_names_that_no_file_system_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tracebacks: `File name too long`, `embedded null byte`."""
    (tmp_path / "a.yaml").write_text('out: "a\\0b"\n')
    for words in (["--out", "x" * 256], ["--runs-dir", "x/" * 3000], ["--config", str(tmp_path / "a.yaml")]):
        assert main(["train", "digits", "--epochs", "1", *words]) == 2
        error = capsys.readouterr().err
        assert "at most 255 bytes" in error or "zero bytes" in error
    assert main(["train", "digits", "--epochs", "1", "--runs-dir", str(tmp_path), "--exp-name", "x" * 300]) == 2
    assert main(["diff", "x" * 300, "y"]) == 2
    assert main(["runs", "x" * 300]) == 2


def test_packed_data_that_claims_more_rows_than_it_holds(tmp_path: Path) -> None:
    """A MemoryError: HDF5 makes up what was never written."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("seqLengths", shape=(2**40, 2), dtype="i4", chunks=(1024, 2))
        file["seqTags"] = np.array([b"a", b"b"])
        file["inputs"] = np.arange(12, dtype=np.float32)
        file.create_group("targets/data")
        file.create_group("targets/size")
    with pytest.raises(paceline.PacelineError, match="claims"):
        paceline.PackedDataset(path)


def test_loader_workers_end_with_a_rank_that_is_killed(tmp_path: Path, task: Path) -> None:
    """They outlived it: for a minute, or for as long as they were busy."""
    pids = tmp_path / "pids"
    pids.mkdir()
    words = ["train", f"{task}:Stuck", *QUICK, "--workers", "2", "--global-batch", "2", "--out", str(tmp_path / "run")]
    rank = command(words, tmp_path / "said", {"PIDS": str(pids)})
    try:
        with deadline(60):
            wait_until(lambda: len(list(pids.iterdir())) == 2 or not rank.is_alive())
        assert rank.is_alive(), (tmp_path / "said").read_text()
        rank.kill()
        rank.join()
        with deadline(20):
            wait_until(lambda: not any(is_running(int(path.name)) for path in pids.iterdir()))
    finally:
        rank.kill()
        for path in pids.iterdir():
            if is_running(int(path.name)):
                os.kill(int(path.name), signal.SIGKILL)


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise after so many seconds."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"not within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def wait_until(is_so: Any) -> None:
    while not is_so():
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_doctor_finds_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Load 20 on two cores was no finding."""
    monkeypatch.chdir(tmp_path)
    cores = os.cpu_count() or 1
    for load, expected in ((20.0 * cores, "warning"), (0.5, "ok")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        main(["doctor", "--device", "cpu", "--json"])
        found = [entry for entry in json.loads(capsys.readouterr().out) if entry["what"] == "load"]
        assert [entry["verdict"] for entry in found] == [expected]
        assert f"{load:.1f} processes ran or wanted to in the last minute" in found[0]["found"]
        assert ("`top` names them" in found[0]["todo"]) == (expected == "warning")


PROBE = """<script>setTimeout(() => {
  const isOut = (each, box) => each.width && (each.right > box.right + 1 || each.left < box.left - 1);
  const scrolls = (e) => { for (let p = e.parentElement; p; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== "visible") return true; return false; };
  const page = { left: -1e6, right: innerWidth };
  const wide = [...document.querySelectorAll("body *")].filter(
    (e) => isOut(e.getBoundingClientRect(), page) && !scrolls(e));
  const cut = [...document.querySelectorAll(".plot")].flatMap((plot) => [...plot.querySelectorAll("text")].filter(
    (text) => isOut(text.getBoundingClientRect(), plot.getBoundingClientRect())));
  const small = [...document.querySelectorAll(".plot text, main p, td")].filter(
    (e) => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 10);
  const found = [...wide, ...cut, ...small].map((e) => `${e.tagName} ${e.textContent.slice(0, 40)}`);
  parent.postMessage(`width ${innerWidth}, unreadable: ${JSON.stringify(found)}`, "*");
}, 12000)</script></body>"""
PHONE = """<body><iframe src="page.html" style="width:390px;height:800px;border:0"></iframe><p id="answer"></p>
<script>addEventListener("message", (event) => { answer.textContent = event.data; })</script></body>"""


def test_nothing_of_a_report_is_cut_or_tiny_on_a_phone(tmp_path: Path) -> None:
    """Numbers in matrices had 5 pixels, names of runs and words without spaces ran out of the page."""
    pytest.importorskip("plotly", reason="plotly is not installed")
    records: list[dict[str, Any]] = usual()
    records[-1]["samples"] = {"dev": [{"reference": "see a cat", "hypothesis": "cat" * 40}] * 2}
    for record in records:
        if record["kind"] == "epoch":
            record["stage"] = f"classes {record['epoch']} of the stream"
    tasks = [f"classes {number}" for number in range(8)]
    results = {"tasks": tasks, "class_il_matrix": [[0.5] * 8] * 8, "class_il": 50.0}
    runs = [
        write_run(tmp_path / name, records) for name in ("quartznet15x5-novograd-lr0.015-8gpu-seed-7-and-more", "b")
    ]
    for run in runs:
        (run / "continual.json").write_text(json.dumps(results))
    page = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "--out", str(page)]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    (tmp_path / "phone.html").write_text(PHONE, encoding="utf-8")
    seen = look(tmp_path / "phone.html", tmp_path / "profile", "--allow-file-access-from-files")
    assert "width 390, unreadable: []" in seen.document, seen.document
