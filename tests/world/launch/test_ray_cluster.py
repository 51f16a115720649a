"""Ranks on a Ray cluster: what is asked of it; and, where Ray is installed, a real one on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.launch import LaunchOptions, _ray_problems
from paceline.cli.main import main
from paceline.world.launch.ray_cluster import Machine, RayJob

JOB = RayJob(2, 4, 4, 6, ("--max-restarts", "3"), ("train", "digits"))
TASK = """
import torch, paceline
class Line(paceline.Task):
    def model(self):
        return torch.nn.Linear(4, 1, dtype=torch.float32, device="cpu")
    def train_data(self):
        x = torch.arange(64, dtype=torch.float32, device="cpu").reshape(16, 4) / 64
        return torch.utils.data.TensorDataset(x, x.sum(1))
    def loss(self, model, grain):
        return (model(grain.x).squeeze(1) - grain.y).square().sum(), len(grain)
"""


def test_a_machine_has_room_for_its_ranks():
    assert JOB.bundle == {"CPU": 24.0, "GPU": 4.0}
    assert RayJob(1, 2, 0, 1, (), ("train",)).bundle == {"CPU": 2.0}


def test_the_launcher_of_each_machine_knows_its_place():
    words = JOB.words(1, "10.0.0.1:4711")
    assert words[1:4] == ["-m", "paceline", "launch"]
    place = "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 4711"
    assert " ".join(words[4:]) == f"{place} --max-restarts 3 -- train digits"
    assert "--nnodes" not in RayJob(1, 2, 0, 1, (), ("train",)).words(0, "10.0.0.1:4711")


def test_what_a_machine_prints_is_handed_on(tmp_path):
    code = "import os, sys; print('out', os.environ['NOTE']); print('err', file=sys.stderr); sys.exit(3)"
    items = list(Machine().run([sys.executable, "-c", code], str(tmp_path), {"NOTE": "word"}))
    assert sorted(map(str, items[:-1])) == ["err\n", "out word\n"]
    assert items[-1] == 3
    lines = list(Machine().run(["true"], str(tmp_path / "elsewhere"), {}))
    assert "there is no folder" in lines[0]
    assert lines[1] == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ray": True, "node_rank": 1}, "--node-rank"),
        ({"ray": True, "nnodes": "1:2", "on_failure": "continue"}, "--nnodes"),
        ({"ray_address": "auto"}, "--ray-address"),
        ({"gpus_per_node": 2}, "--gpus-per-node"),
    ],
)
def test_options_that_do_not_go_together(options, problem):
    assert [each.where for each in _ray_problems(LaunchOptions(**options))] == [problem]


def test_without_ray_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["launch", "--ray", "--nproc-per-node", "2", "--", "train", "digits"]) == 2
    assert "pip install 'paceline[ray]'" in capsys.readouterr().err


def test_two_ranks_on_a_real_ray(tmp_path: Path):
    pytest.importorskip("ray", reason="ray is not installed")
    (tmp_path / "line.py").write_text(TASK)
    launch = [
        sys.executable,
        "-m",
        "paceline",
        "launch",
        "--ray",
        "--nproc-per-node",
        "2",
        "--",
        "train",
        "line.py:Line",
    ]
    words = [*launch, "--out", "run", "--steps", "6", "--global-batch", "4", "--device", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after" in done.stdout
    assert len(list((tmp_path / "run/logs").glob("rank-*.log"))) == 2


IN_RAY_TRAIN = """
import json, ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def loop():
    import sys
    sys.path.insert(0, FOLDER)
    import paceline, torch.distributed
    from line import Line
    result = paceline.fit(Line(), steps=6, global_batch=4, device="cpu", progress="none", out=FOLDER + "/run")
    rank = torch.distributed.get_rank()  # the group is still there
    weights = [value.tolist() for value in result.model.state_dict().values()]
    with open(FOLDER + f"/result{rank}", "w") as file:
        json.dump([result.status, result.num_steps, weights], file)

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=FOLDER)).fit()
"""


def test_workers_of_a_real_ray_train(tmp_path: Path):
    pytest.importorskip("ray.train.torch", reason="ray[train] is not installed")
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "main.py").write_text(IN_RAY_TRAIN.replace("FOLDER", repr(str(tmp_path))))
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"result{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert first[:2] == ["finished", 6]
