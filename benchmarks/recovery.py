"""Seconds from the SIGKILL of one of 4 ranks under `--procs` to the next finished step, and what they were spent on.

    python benchmarks/recovery.py [--kills 10] [--ranks 4] [--seed 0] [--json]

The launcher starts all ranks again, which resume from the newest checkpoint. A random rank dies at a random moment. The
phases are those of rank 0: `notice` until the launcher has ended the other ranks and starts again, `import` until the
new process has imported torch and the task, `meet` until the ranks have met and the folder was looked at, `step` until
the first step is done (model, resume, data).
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

MARKS = "RECOVERY_MARKS"
AGAIN = "starting all ranks again"
DEADLINE_S = 120.0
PHASES = ("notice", "import", "meet", "step")


# -- the ranks ---------------------------------------------------------------------------------------------------------


def mark(name: str, rank: int) -> None:
    line = json.dumps([name, rank, os.getpid(), time.time()])
    with open(os.environ[MARKS], "a") as file:
        file.write(f"{line}\n")


if MARKS in os.environ and "RANK" in os.environ:
    mark("import", int(os.environ["RANK"]))


class Digits(paceline.Task):
    """A small net on random points, whose every step is marked."""

    def model(self) -> nn.Module:
        mark("meet", self.world.rank)
        return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))

    def train_data(self) -> TensorDataset:
        random_numbers = torch.Generator().manual_seed(0)
        x = torch.randn(512, 64, generator=random_numbers)
        return TensorDataset(x, torch.randint(0, 10, (512,), generator=random_numbers))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        mark("step", self.world.rank)
        time.sleep(0.02)


# -- the campaign ------------------------------------------------------------------------------------------------------


class Campaign:
    """A run that is killed again and again."""

    def __init__(self, folder: Path, ranks: int, kills: int) -> None:
        self._marks, self._ranks = folder / "marks", ranks
        self._marks.touch()
        words = [sys.executable, "-m", "paceline", "train", f"{__file__}:Digits", "--procs", str(ranks)]
        words += ["--on-failure", "restart", "--max-restarts", str(kills), "--out", str(folder / "run")]
        words += ["--epochs", "1000000", "--level", "0"]
        words += ["--global-batch", "64", "--grains", str(ranks), "--save-every-steps", "10", "--device", "cpu"]
        words += ["--save-every-epochs", "1000000", "--workers", "0", "--lr", "0.001"]
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARKS: str(self._marks)},
        )
        self._restarts: list[float] = []
        self.said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if AGAIN in line:
                self._restarts.append(time.time())

    def marks(self, since: float) -> list[tuple[str, int, int, float]]:
        lines = self._marks.read_text().splitlines()[-5000:]
        entries = [tuple(json.loads(line)) for line in lines if line.endswith("]")]
        return [entry for entry in entries if entry[3] > since]  # type: ignore[misc]

    def first(self, name: str, since: float, rank: int = 0) -> float:
        """Time of the first mark of this name; waits for it."""
        deadline = time.time() + DEADLINE_S
        while True:
            for each, of, _, moment in self.marks(since):
                if (each, of) == (name, rank):
                    return moment
            if time.time() > deadline or self.process.poll() is not None:
                raise SystemExit(f"no {name!r} after the kill:\n" + "".join(self.said[-30:]))
            time.sleep(0.01)

    def kill(self, rank: int, since: float) -> dict[str, float]:
        """Kill a rank; return seconds by phase, and the whole as `all`."""
        victim = next(pid for name, of, pid, _ in reversed(self.marks(since)) if (name, of) == ("step", rank))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        ends = {name: self.first(name, killed) for name in ("import", "meet")}
        ends["step"] = self.first("step", ends["meet"])
        ends["notice"] = next(moment for moment in self._restarts if moment > killed)
        moments = [killed, *(ends[name] for name in PHASES)]
        phases = {name: end - begin for name, begin, end in zip(PHASES, moments, moments[1:], strict=False)}
        return {**phases, "all": ends["step"] - killed, "end": ends["step"]}


def measure(ranks: int, kills: int, seed: int) -> list[dict[str, float]]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), ranks, kills)
        try:
            begin = campaign.first("step", 0.0)
            results = []
            for _ in range(kills):
                time.sleep(1.0 + chance.random())
                result = campaign.kill(chance.randrange(ranks), begin)
                begin = result.pop("end")
                results.append(result)
        finally:
            campaign.process.kill()
            campaign.process.wait()
            time.sleep(1.0)  # its ranks save and leave
    return results


def main() -> None:
    from table import Row, parser, show  # not in the ranks: they import this file from elsewhere

    arguments = parser(__doc__ or "")
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    results = measure(options.ranks, options.kills, options.seed)
    rows = []
    for name in (*PHASES, "all"):
        values = [result[name] for result in results]
        rows.append(Row(name, "median", statistics.median(values), "s"))
        rows.append(Row(name, "worst", max(values), "s"))
    title = f"SIGKILL of one of {options.ranks} ranks, {options.kills} times: until the next finished step"
    show(rows, title, options.json)


if __name__ == "__main__":
    main()
