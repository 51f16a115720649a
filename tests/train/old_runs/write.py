"""Write the runs of this folder: `python write.py FOLDER`, with the version of Paceline that they are to be of.

Each run is killed in mid-epoch, after its first checkpoint; a copy of it is resumed to its end by the same version, and
the digest of every tensor of its last checkpoint goes into `ends.json`: what any later version must come to, bit for
bit (on the same kind of CPU, with the same torch).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
COMMON = [
    "--steps",
    "12",
    "--save-every-steps",
    "5",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--seed",
    "3",
    "--level",
    "0",
]
IMAGES = ["--global-batch", "8", "--grains", "2", "--val-every-steps", "6", "--optimizer", "adamw", "--lr", "0.01"]
RUNS = {
    "alone": ["tasks.py:Images", *COMMON, *IMAGES, "--ema", "0.9", "--clip-norm", "0.5"],
    "averaged": [
        *["tasks.py:Images", *COMMON, *IMAGES, "--procs", "2", "--reduce", "param"],
        *["--sync-step", "3", "--sync-state", "keep"],
    ],
    "continual": [
        *["tasks.py:Digits", *COMMON, "--dataset", "seq-digits", "--method", "derpp", "--buffer-size", "20"],
        *["--num-tasks", "2", "--global-batch", "10", "--minibatch-size", "6", "--grains", "2", "--lr", "0.05"],
    ],
}
KILL_AT = 8


def train(name: str, out: Path, *more: str, kill_at: int | None = None) -> None:
    command = [sys.executable, "-m", "paceline", "train", *RUNS[name], "--out", str(out), *more]
    environment = {**os.environ, "PACELINE_RUN": str(out), "OMP_NUM_THREADS": "1"}
    if kill_at is not None:
        environment["PACELINE_KILL_AT"] = str(kill_at)
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (kill_at is None), done.stderr


def end(run: Path) -> dict[str, Any]:
    """Return what a finished run came to: its last checkpoint, a digest of each tensor in it, the loss of each step."""
    checkpoint = max((run / "checkpoints").glob("step-*"))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    return {"checkpoint": checkpoint.name, "tensors": digests(checkpoint), "losses": losses}


def digests(checkpoint: Path) -> dict[str, str]:
    """A digest for each tensor of a checkpoint, as `part/name`."""
    values = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            values[f"{file.stem}/{name}"] = hashlib.sha256(data).hexdigest()[:16]
    return values


def machine() -> dict[str, str]:
    return {
        "torch": torch.__version__.split("+")[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }


def main(folder: Path) -> None:
    ends = {}
    for name in RUNS:
        run, copy = folder / name, folder / f"{name}-copy"
        train(name, run, kill_at=KILL_AT)
        shutil.copytree(run, copy)
        train(name, copy, "--resume", "auto")
        ends[name] = end(copy)
        shutil.rmtree(copy)
        _make_anonymous(run, folder)
    (folder / "ends.json").write_text(json.dumps({"made_on": machine(), "ends": ends}, indent=1) + "\n")


def _make_anonymous(run: Path, folder: Path) -> None:
    """Leave what a resume needs, without the names of the machine that it was written on."""
    for name in ("tensorboard", "logs"):
        shutil.rmtree(run / name, ignore_errors=True)
    for unfinished in run.glob("checkpoints/.writing-*"):
        shutil.rmtree(unfinished)
    (run / ".lock").unlink()
    record = json.loads((run / "run.json").read_text())
    for start in record["starts"]:
        start["host"], start["git"] = "host", None
    journal = run / "metrics.jsonl"
    journal.write_text(journal.read_text().replace(f'"{socket.gethostname()}"', '"host"'))
    text = json.dumps(record, indent=1).replace(str(folder), "runs").replace(f"{HERE}/", "")
    (run / "run.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
