"""W&B (offline) and MLflow (a local database) with their real packages: one run, from the first rank alone, that goes
on when it is resumed, with the settings; what a server does not take never ends the training.

Neither is in CI: W&B takes 10 s to install and 73 MB, MLflow with its database 30 s and 90 MB.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
import os, sys
rank = 0
if sys.argv[3] == "2":
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = 1 if os.fork() == 0 else 0
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
import torch
import paceline

class Small(paceline.Task):
    def model(self):
        return torch.nn.Linear(2, 1)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.ones(16, 2), torch.ones(16, 1))

    def val_data(self):
        return {"dev": self.train_data()}

    def loss(self, model, grain):
        self.log("recall@5", 1.0)
        return (model(grain.x) - grain.y).square().sum(), len(grain)

logger, out = sys.argv[1:3]
settings = dict(out=out, global_batch=4, grains=2, log_every=2, loggers=[logger], progress="lines", lr=0.125, threads=1)
paceline.fit(Small(), epochs=1, **settings)
print("resumed", flush=True)
result = paceline.fit(Small(), epochs=2, resume="auto", allow_change=True, **settings)
print("status", result.status, result.num_steps, flush=True)
os._exit(0) if rank else None
"""

READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):  # LevelDB's log: a header of 7 bytes, blocks of 32 kB, records in pieces (checksum, length, kind)
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""

found = {"history": [], "config": {}, "id": None}
for data in records(Path(sys.argv[1]).read_bytes()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "run":
        found["id"] = record.run.run_id
        found["config"] |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
    if kind == "history":
        items = [(each.key or "/".join(each.nested_key), each.value_json) for each in record.history.item]
        found["history"].append({name: json.loads(value) for name, value in items})
print(json.dumps(found))
"""

READ_MLFLOW = """
import json
from mlflow import MlflowClient
client = MlflowClient()
runs = client.search_runs(["0"])
found = []
for run in runs:
    points = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    history = {name: [[each.step, each.value] for each in row] for name, row in points.items()}
    found.append({"id": run.info.run_id, "params": run.data.params, "status": run.info.status, "history": history})
print(json.dumps(found))
"""


def call(code: str, *words: str, folder: Path, **env: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, timeout=200, cwd=folder, env={**os.environ, **env},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def need(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_wandb_offline(ranks: str, tmp_path: Path) -> None:
    need("wandb")
    said = call(TRAIN, "wandb", "run", ranks, folder=tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    assert "status finished 8" in said
    assert "failed" not in said
    first, second = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    found: list[dict[str, Any]] = [json.loads(call(READ_WANDB, str(file), folder=tmp_path)) for file in (first, second)]
    name = (tmp_path / "run" / "wandb-run-id").read_text().strip()
    assert [each["id"] for each in found] == [name, name]
    assert found[0]["config"]["lr"] == 0.125
    for each, steps in zip(found, ([1, 3], [5, 7]), strict=True):
        logged = [row for row in each["history"] if "loss" in row]
        assert [row["_step"] for row in logged] == steps
        assert all(row["recall@5"] == 1.0 for row in logged)
        assert any("dev/loss" in row for row in each["history"])


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_mlflow_in_a_local_database(ranks: str, tmp_path: Path) -> None:
    need("mlflow", "sqlalchemy", "alembic")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    said = call(TRAIN, "mlflow", "run", ranks, folder=tmp_path, MLFLOW_TRACKING_URI=address)
    assert "status finished 8" in said
    assert "failed" not in said
    (run,) = json.loads(call(READ_MLFLOW, folder=tmp_path, MLFLOW_TRACKING_URI=address))
    assert run["id"] == (tmp_path / "run" / "mlflow-run-id").read_text().strip()
    assert (run["status"], run["params"]["lr"]) == ("FINISHED", "0.125")
    assert [step for step, _ in run["history"]["loss"]] == [1, 3, 5, 7]
    assert run["history"]["recall_5"] == [[1, 1.0], [3, 1.0], [5, 1.0], [7, 1.0]]
    assert [step for step, _ in run["history"]["dev/loss"]] == [3, 7]
    assert run["history"]["epoch/number"][-1] == [7, 2.0]


def test_a_database_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    need("mlflow", "sqlalchemy", "alembic")
    broken = TRAIN.replace('print("resumed"', 'open("mlflow.db", "wb").write(bytes(9)); print("resumed"')
    said = call(broken, "mlflow", "run", "1", folder=tmp_path, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db")
    assert "status finished 8" in said
    assert "the logger mlflow did not start" in said.split("resumed\n", 1)[1]
