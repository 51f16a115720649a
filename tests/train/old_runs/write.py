"""Write the runs of commit 603eff0, in a checkout of it: `python -m tests.train.old_runs.write FOLDER`.

Each run is killed by SIGKILL in mid-epoch. A copy of it is resumed to its end by the same version, and the result
goes into `ends.json`: a digest of every tensor of the last checkpoint, its other state (position, optimizer settings,
labels), and the records of all steps, epochs and validations. An uninterrupted run must give the same, or the program
fails.

CPU kernels are chosen by environment variables, not by the machine (`Version.kernels`), so that the bits are those of
any x86-64 CPU with AVX2, for one version of torch.

The runs in `603eff0/` are the output of that command with this folder's files on top of 603eff0. Those directly in
this folder were written by the program that was here at ce01e4b; only their resuming is described here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.train.old_runs import inputs

HERE = Path(__file__).parent
WRITTEN = "603eff0"
"""Commit of the runs in `603eff0/`."""
KILL_AT = 11
"""Steps after which they are killed; the checkpoint of the step before is stored, and is in mid-epoch."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
EXACT = "--device cpu --threads 1 --seed 3 --level 0"
IMAGES = "--global-batch 8 --grains 2 --optimizer adamw --lr 0.01"
PLAIN = f"{IMAGES} --val-every-steps 6 --ema 0.9 --clip-norm 0.5 --schedule cosine --warmup-steps 4"
DIGITS = "--dataset seq-digits --method derpp --buffer-size 20 --num-tasks 2"
DATA_KEYS = {
    "step": None,
    "validation": None,
    "epoch": ("kind", "step", "epoch", "steps", "loss", "skipped", "padding", "samples"),
}
"""Kinds of records that are compared, with their keys; None: all but the measured ones."""
MEASURED_KEYS = ("seconds",)


@dataclass(frozen=True)
class Version:
    """Runs of one commit, and how to continue them."""

    folder: Path
    kernels: dict[str, str]
    """Environment variables that select the kernels of torch, oneDNN and MKL."""
    common: str
    runs: dict[str, str] = field(default_factory=dict)
    """Task and options by the run's name; `{data}` is the folder of `inputs.write`."""


VERSIONS = {
    "ce01e4b": Version(
        HERE,
        # Written without a setting for MKL, which takes other kernels on Intel's CPUs than on AMD's even with this one.
        {**AVX2, "MKL_CBWR": "AVX2"},
        f"{EXACT} --steps 12 --save-every-steps 5",
        {
            "alone": f"tasks.py:Images {IMAGES} --val-every-steps 6 --ema 0.9 --clip-norm 0.5",
            "averaged": f"tasks.py:Images {IMAGES} --val-every-steps 6 --procs 2 --reduce param --sync-step 3"
            " --sync-state keep",
            "continual": f"tasks.py:Digits {DIGITS} --global-batch 10 --minibatch-size 6 --grains 2 --lr 0.05",
        },
    ),
    "603eff0": Version(
        HERE / "603eff0",
        # MKL's only setting that gives the same bits on CPUs of Intel and AMD.
        {**AVX2, "MKL_CBWR": "COMPATIBLE"},
        EXACT + " --steps 16 --save-every-steps 5 --keep-last {keep_last} --keep-best 0 --log-every 1",
        {
            "plain": f"tasks.py:Images {PLAIN}",
            "exact": f"tasks.py:Images {PLAIN} --procs 2 --sums exact",
            "averaged": f"tasks.py:Images {IMAGES} --procs 2 --reduce param --sync-step 3 --sync-state keep"
            " --outer momentum --wire bf16",
            "sharded": f"tasks.py:Images {IMAGES} --procs 2 --shard full --val-every-steps 6 --ema 0.9",
            "pieces": f"tasks.py:Images {IMAGES} --procs 2 --shard full --checkpoint-form sharded",
            "continual": f"continual {DIGITS} --backbone tasks.py:Narrow --strategy class-balanced --global-batch 10"
            " --minibatch-size 6 --grains 2 --lr 0.05 --momentum 0.9 --limit-batches 7",
            "asr": "asr --network network.yaml --vocabulary 9 --train-manifest {data}/train.json"
            " --val-manifest {data}/dev.json --global-batch 4 --grains 2 --gain-db -3 3",
            "translation": "translation --train-source {data}/train.en --train-target {data}/train.de"
            " --val-source {data}/dev.en --val-target {data}/dev.de --tokens words --width 8 --ffn-width 16 --heads 2"
            " --encoder-layers 1 --decoder-layers 1 --dropout 0.1 --lr 0.005 --warmup-steps 4 --global-batch 8"
            " --grains 2 --output-ratio 1.0",
        },
    ),
}


def train(
    version: str, name: str, run: Path, data: Path, *options: str, keep_last: int = 1, kill: bool = False
) -> None:
    """Run `paceline train` in a child process, with the kernels of the version."""
    written = VERSIONS[version]
    task, *rest = f"{written.runs[name]} {written.common}".format(data=data, keep_last=keep_last).split()
    command = [task, *rest, "--out", str(run), *options]
    environment = {**os.environ, **written.kernels, "OMP_NUM_THREADS": "1", "PACELINE_RUN": str(run)}
    if kill:
        environment["PACELINE_KILL_AT"] = str(KILL_AT)
    program = ["tasks.py"] if kill and "tasks.py:" not in task else ["-m", "paceline"]
    done = subprocess.run(
        [sys.executable, *program, "train", *command],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    # The launcher of several ranks reports their death by a code of its own.
    has_ended = done.returncode == 0 if not kill else done.returncode in (-signal.SIGKILL, 1)
    assert has_ended, done.stdout + done.stderr


def end(run: Path) -> dict[str, Any]:
    """Return what a finished run came to."""
    checkpoint = max((run / "checkpoints").glob("step-*"))
    return {"checkpoint": checkpoint.name, **content(checkpoint), "records": records(run)}


def content(checkpoint: Path) -> dict[str, Any]:
    """Return a digest of every tensor of a checkpoint, and its other state without what is measured by a clock."""
    state = json.loads((checkpoint / "state.json").read_text())["state"]
    return {"tensors": digests(checkpoint), "state": {key: state[key] for key in state if key != "so_far"}}


def digests(checkpoint: Path) -> dict[str, str]:
    """Return a digest of each tensor of a checkpoint, as `part/name`."""
    values = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            values[f"{file.stem}/{name}"] = hashlib.sha256(data).hexdigest()[:16]
    return values


def records(run: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` without what is measured by a clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = []
    for line in lines:
        if line["kind"] in DATA_KEYS:
            keys = DATA_KEYS[line["kind"]] or [key for key in line if key not in MEASURED_KEYS]
            kept.append({key: line[key] for key in keys if key in line})
    return kept


def machine() -> dict[str, str]:
    """Return what the bits depend on besides the kernels that are set."""
    # A CPU with AVX-512 computes with the kernels of AVX2, too, if told so.
    capability = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX2")
    return {"torch": torch.__version__.split("+")[0], "cpu": capability, "machine": platform.machine()}


def main(folder: Path) -> None:
    ends = {}
    data = folder / "data"
    inputs.write(data)
    for name in VERSIONS[WRITTEN].runs:
        run, resumed, whole = folder / name, folder / f"{name}-resumed", folder / f"{name}-whole"
        train(WRITTEN, name, run, data, kill=True)
        assert [path.name for path in run.glob("checkpoints/step-*")] == [f"step-{KILL_AT - 1:08d}"], name
        shutil.copytree(run, resumed)
        train(WRITTEN, name, resumed, data, "--resume", "auto")
        train(WRITTEN, name, whole, data)
        ends[name] = end(resumed)
        assert ends[name] == end(whole), name
        shutil.rmtree(resumed)
        shutil.rmtree(whole)
        _make_anonymous(run, folder, data)
    shutil.rmtree(data)
    written = {"made_on": machine(), "kernels": VERSIONS[WRITTEN].kernels, "ends": ends}
    (folder / "ends.json").write_text(json.dumps(written, indent=1) + "\n")


def _make_anonymous(run: Path, folder: Path, data: Path) -> None:
    """Leave what a resume needs, without the names of the machine that it was written on."""
    for name in ("tensorboard", "logs"):
        shutil.rmtree(run / name, ignore_errors=True)
    for path in (run / ".lock", *run.glob("*.svg")):
        path.unlink()
    for unfinished in run.glob("checkpoints/.writing-*"):
        shutil.rmtree(unfinished)
    record = json.loads((run / "run.json").read_text())
    for start in record["starts"]:
        start["host"], start["git"] = "host", None
    (run / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    (run / "run.json").chmod(0o644)
    for path in run.glob("*.json*"):
        text = path.read_text().replace(str(data), "{data}").replace(str(folder), "runs").replace(f"{HERE}/", "")
        path.write_text(text.replace(f'"{socket.gethostname()}"', '"host"'))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
