"""Runs ports as an outside user would, on 1 and more ranks, each in processes that have their packages already.

`python run_ports.py FOLDER NAME:RANKS...`: a line of JSON per port and rank, with a digest of everything it trained.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import paceline
from tests.vision import define_operators_of_vision

PORTS = Path(__file__).parents[2] / "examples" / "ports"


def digest(modules: list[torch.nn.Module]) -> str:
    """Return a digest of every number in these models."""
    total = hashlib.sha256()
    for module in modules:
        for name, tensor in sorted(module.state_dict().items()):
            total.update(name.encode())
            total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def outcome(names: dict[str, Any]) -> dict[str, Any]:
    """Return what a port has come to, from its global names."""
    result = names.get("result")
    if isinstance(result, paceline.Result):
        assert result.model is not None
        return {"numbers": {**result.metrics, "loss": result.loss}, "digest": digest([result.model])}
    steps = {name: value.loss for name, value in names.items() if type(value).__name__ == "Step"}
    modules = [value for _, value in sorted(names.items()) if isinstance(value, torch.nn.Sequential)]
    assert steps
    assert modules
    return {"numbers": {**steps, **(result or {})}, "digest": digest(modules)}


def run(folder: Path, name: str, size: int) -> list[dict[str, Any]]:
    """Fork the ranks, run the port in each, and say how they ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({key: str(value) for key, value in job.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            work(folder, name, f"{name}-{size}-{rank}")
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    answers = []
    for rank, code in enumerate(codes):
        files = [folder / f"{name}-{size}-{rank}.{kind}" for kind in ("out", "err", "json")]
        out, err, numbers = (file.read_text() if file.exists() else "" for file in files)
        found = json.loads(numbers) if numbers else {}
        answers.append({"port": name, "size": size, "rank": rank, "code": code, "out": out, "err": err, **found})
    return answers


def work(folder: Path, name: str, label: str) -> None:
    """Run a port to its end, and end this process."""
    place = folder / label
    place.mkdir(parents=True)
    os.chdir(place)
    for kind, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{label}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    code = 0
    try:
        script = PORTS / f"{name}.py"
        sys.argv = [str(script)]
        names = runpy.run_path(str(script), run_name="__main__")
        (folder / f"{label}.json").write_text(json.dumps(outcome(names)))
    except BaseException:  # the end of this process: whatever it is, it is reported
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    define_operators_of_vision()
    # What takes the time is loaded once and inherited.
    for package in (
        "timm.data",
        "timm.loss",
        "timm.optim",
        "transformers",
        "sacrebleu",
        "torchmetrics",
        "sklearn.datasets",
    ):
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            importlib.import_module(package)
    if importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers").GPT2LMHeadModel  # noqa: B018  its modules come on first use
    for attribute in paceline.__all__:
        getattr(paceline, attribute)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for job in sys.argv[2:]:
        port_name, num_ranks = job.rsplit(":", 1)
        for answer in run(Path(sys.argv[1]), port_name, int(num_ranks)):
            print(json.dumps(answer), flush=True)
