from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config.settings import TrainConfig
from paceline.train.checkpoint.checkpoints import Checkpoints
from paceline.train.checkpoint.format import listed
from paceline.train.checkpoint.reader import Checkpoint
from paceline.train.checkpoint.session import RunSession
from paceline.world.discover.environment import World
from paceline.world.link import Link

ALONE = Link(World(0, 0, 1, 1, 0, 1, "plain", None), torch.device("cpu"), 1, ("here",))


class Points(paceline.Task):
    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(12, 2), torch.zeros(12, dtype=torch.int64))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of 3 and 6 steps."""
    out = tmp_path_factory.mktemp("checkpoints") / "run"
    paceline.fit(
        Points(), steps=6, global_batch=2, save_every_steps=3, out=out, device="cpu", loggers=[], progress="none"
    )
    return out


def newest(run: Path, copied_step: int) -> tuple[int, str]:
    """Return what survivors with a copy of so many steps go on from: its step, and where it is."""
    config = TrainConfig(steps=6, global_batch=2, save_every_steps=3, out=run, device="cpu", resume="auto")
    session = RunSession(config, ALONE, lambda line: None, "Points", is_reopened=True)
    found = Checkpoints(session.resume, ALONE, lambda line: None).find_newest(
        Checkpoint(copied_step, {}, {}, None, Path("memory"))
    )
    assert found is not None
    return found.step, found.path.name


def test_survivors_resume_from_the_newest_of_replica_and_checkpoint(run: Path) -> None:
    """A rank may die after a checkpoint was written, and before the others have copied that moment: to go back behind
    it dropped lines of the journal, which nobody wrote again when all died, and the checkpoint was gone on from."""
    assert newest(run, 6) == (6, "memory")
    assert newest(run, 7) == (7, "memory")
    assert newest(run, 4) == (6, "step-00000006")


def test_a_broken_checkpoint_is_not_newer_than_a_replica(run: Path) -> None:
    (listed(run / "checkpoints")[0] / "state.json").write_text("{")
    assert newest(run, 4) == (4, "memory")
    assert newest(run, 2) == (3, "step-00000003")
