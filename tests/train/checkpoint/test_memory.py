from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config.settings import TrainConfig
from paceline.core.run_folder import RunFolder, RunRecord, read_record
from paceline.train.checkpoint import memory as memory_module
from paceline.train.checkpoint import reader
from paceline.train.checkpoint.memory import COST, LONGEST_S, MemoryState, same_on_all, save_alone, steps_between
from paceline.world.discover.environment import World
from paceline.world.link import Link
from tests.ranks import ranks

ALONE = Link(World(0, 0, 1, 1, 0, 1, "plain", None), torch.device("cpu"), 1, ("here",))
PARTS = {
    "model": {"weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(7), "none": torch.zeros(0, 2)},
    "task": {"seen": torch.tensor([True, False])},
}


def test_copy_is_one_of_its_moment() -> None:
    memory, weight = MemoryState(), torch.ones(3)
    assert memory.checkpoint() is None
    memory.take(ALONE, 4, {"model": {"weight": weight}, "task": {"seen": weight}}, {"position": {"scores": [1.0]}})
    weight.add_(1.0)
    copy = memory.checkpoint()
    assert copy is not None
    assert copy.step == 4
    assert copy.parts["model"]["weight"].tolist() == [1.0, 1.0, 1.0]
    copy.parts["task"]["seen"].add_(5.0)
    copy.state["position"]["scores"].append(2.0)
    again = memory.checkpoint()
    assert again is not None
    assert again.parts["task"]["seen"].tolist() == [1.0, 1.0, 1.0]
    assert again.state == {"position": {"scores": [1.0]}}


@pytest.mark.parametrize(("copy_s", "step_s"), [(1e-3, 5e-3), (0.06, 0.02), (0.3, 0.5), (0.0, 0.1), (5.0, 10.0)])
def test_copies_cost_their_share_at_most(copy_s: float, step_s: float) -> None:
    steps = steps_between(copy_s, step_s)
    assert steps >= 1
    assert steps * step_s <= max(LONGEST_S + step_s, step_s)
    assert copy_s <= COST * steps * step_s * (1 + 1e-9) or (steps + 1) * step_s > LONGEST_S


@ranks(2, 3)
def test_all_ranks_get_the_copy_of_those_that_have_it(link: Link) -> None:
    memory = MemoryState()
    if link.world.rank == 1:
        memory.take(link, 12, PARTS, {"position": {"epoch": 3, "scores": [0.5]}})
    elif link.world.rank == 0:
        memory.take(link, 3, {"model": {"other": torch.ones(1)}}, {})  # older: not the one that is shared
    memory.share(link, (1,))
    copy = memory.checkpoint()
    assert copy is not None
    assert copy.step == 12
    assert copy.state == {"position": {"epoch": 3, "scores": [0.5]}}
    assert copy.parts.keys() == PARTS.keys()
    for part, tensors in PARTS.items():
        for name, tensor in tensors.items():
            assert copy.parts[part][name].dtype == tensor.dtype
            assert torch.equal(copy.parts[part][name], tensor)


@ranks(2)
def test_what_all_have_is_not_sent(link: Link) -> None:
    memory = MemoryState()
    memory.take(link, link.world.rank, {"model": {"weight": torch.tensor([float(link.world.rank)])}}, {})
    memory.share(link, (0, 1))
    assert memory.step == link.world.rank


@ranks(1, 2)
def test_state_that_only_the_first_rank_has_comes_to_all(link: Link) -> None:
    own = PARTS["model"] if link.is_first else {}
    got = same_on_all(link, own)
    assert got.keys() == PARTS["model"].keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in PARTS["model"].items())


class TestSavedAlone:
    """A process that has nobody left to ask writes the copy that it has."""

    @staticmethod
    def run(folder: Path) -> RunFolder:
        run = RunFolder(folder)
        run.write(RunRecord({}, "task", "running", grains=4))
        return run

    @staticmethod
    def copy(step: int) -> MemoryState:
        memory = MemoryState()
        memory.take(ALONE, step, PARTS, {"position": {"epoch": 3}})
        return memory

    def test_is_a_checkpoint_like_others(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        assert save_alone(self.copy(12), TrainConfig(epochs=1, out=tmp_path), is_certain=True) == 12
        found = reader.newest(run.checkpoints).checkpoint
        assert found is not None
        assert (found.step, found.state) == (12, {"position": {"epoch": 3}})
        assert torch.equal(found.parts["model"]["weight"], PARTS["model"]["weight"])
        assert read_record(tmp_path).status == "stopped"
        run.lock()  # nobody has it
        run.unlock()

    def test_one_process_speaks_and_the_newest_copy_wins(self, tmp_path: Path) -> None:
        self.run(tmp_path)
        config = TrainConfig(epochs=1, out=tmp_path)
        assert [save_alone(self.copy(step), config, is_certain=True) for step in (12, 12, 8, 13)] == [
            12,
            None,
            None,
            13,
        ]

    def test_checkpoint_that_is_as_new_stands(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        config = TrainConfig(epochs=1, out=tmp_path)
        assert save_alone(self.copy(12), config, is_certain=True) == 12
        run.write(RunRecord({}, "task", "running", grains=4))
        assert save_alone(MemoryState(), config, is_certain=True) == 12  # of shards there is no copy
        assert read_record(tmp_path).status == "stopped"

    def test_leaves_the_folder_to_those_that_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_module, "_LOCK_S", 0.0)
        run = self.run(tmp_path)
        run.lock()
        try:
            assert save_alone(self.copy(12), TrainConfig(epochs=1, out=tmp_path), is_certain=True) is None
        finally:
            run.unlock()
        assert reader.newest(run.checkpoints).checkpoint is None

    def test_who_is_cut_off_itself_leaves_a_run_that_others_write_to(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory_module, "WATCHED_S", 0.05)
        run = self.run(tmp_path)
        config = TrainConfig(epochs=1, out=tmp_path)
        sizes = iter(range(100))
        with monkeypatch.context() as patch:
            patch.setattr(memory_module, "_written", lambda folder: next(sizes))
            assert save_alone(self.copy(12), config, is_certain=False) is None
        run.lock()
        assert save_alone(self.copy(12), config, is_certain=False) is None
        run.unlock()
        assert save_alone(self.copy(12), config, is_certain=False) == 12

    def test_needs_a_run_and_a_copy(self, tmp_path: Path) -> None:
        assert save_alone(self.copy(12), TrainConfig(epochs=1), is_certain=True) is None
        assert save_alone(self.copy(12), TrainConfig(epochs=1, out=tmp_path), is_certain=True) is None
        self.run(tmp_path)
        assert save_alone(MemoryState(), TrainConfig(epochs=1, out=tmp_path), is_certain=True) is None
