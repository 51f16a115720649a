"""Activation checkpointing changes memory and nothing else."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from paceline.core.errors import NotFound
from paceline.speed.precision import capabilities
from paceline.speed.recompute import recompute


class Block(nn.Module):
    """Counts how often it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, gain: float) -> torch.Tensor:
        self.calls += 1
        return self.drop(self.norm(self.conv(x)).relu()) * gain


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, gain=1.5)
        return self.head(x)


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def train(model: nn.Module, num_steps: int = 4, device: str = "cpu") -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(num_steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, 8).to(device)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("patterns", [["blocks.*"], ["blocks"], ["blocks.1", "head"], ["*.conv", "*.norm"]])
def test_bitwise_the_same_training(patterns: list[str]) -> None:
    plain, saved = network(), network()
    recompute(saved, patterns)
    assert [loss.item() for loss in train(plain)] == [loss.item() for loss in train(saved)]
    assert_same(plain, saved)
    assert saved.blocks[0].norm.num_batches_tracked == 4


def test_chosen_modules_run_twice_others_once() -> None:
    model = network()
    assert recompute(model, ["blocks.0", "blocks.2*"]) == ["blocks.0", "blocks.2"]
    train(model, num_steps=3)
    assert [block.calls for block in model.blocks] == [6, 3, 6]


def test_only_the_outermost_match_is_chosen_and_once() -> None:
    model = network()
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert recompute(model, ["*"]) == [*blocks, "head"], "a ModuleList is never called: its children are taken"
    assert recompute(model, ["blocks", "blocks.0.conv"]) == blocks
    train(model, num_steps=1)
    assert [block.calls for block in model.blocks] == [2, 2, 2]


def test_nothing_is_recomputed_without_gradients_or_in_a_frozen_batch_norm() -> None:
    plain, saved = network(), network()
    recompute(saved, ["blocks.*"])
    x = torch.randn(5, 4, 8)
    with torch.no_grad():
        saved.eval()
        plain.eval()
        assert torch.equal(saved(x), plain(x))
    assert saved.blocks[0].calls == 1
    plain(x).sum().backward()
    saved(x).sum().backward()
    assert_same(plain, saved)
    assert saved.blocks[0].norm.num_batches_tracked == 0


def test_a_deep_copy_is_independent() -> None:
    plain, saved = network(), network()
    recompute(saved, ["blocks.*"])
    twin = copy.deepcopy(saved)
    train(twin)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), saved.parameters(), strict=True))
    assert saved.blocks[0].calls == 0
    train(plain)
    assert_same(plain, twin)


def test_batch_norm_buffers_stay_the_same_objects() -> None:
    model = network()
    buffers = [id(buffer) for buffer in model.buffers()]
    recompute(model, ["blocks.*"])
    train(model, num_steps=2)
    assert [id(buffer) for buffer in model.buffers()] == buffers


def test_the_same_under_compile() -> None:
    if not capabilities(torch.device("cpu")).compiler:
        pytest.skip("no C++ compiler here")

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
        return nn.Sequential(block, nn.Linear(8, 2))

    plain, saved = layers(), layers()
    recompute(saved, ["0"])
    with warnings.catch_warnings():  # torch's compiler warns of its own deprecated parts
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = train(torch.compile(plain), num_steps=2)
        actual = train(torch.compile(saved), num_steps=2)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(saved.state_dict(), plain.state_dict())
    assert saved[0][1].num_batches_tracked == 2


def test_a_pattern_without_match_names_the_nearest_modules() -> None:
    with pytest.raises(NotFound, match="matches no module") as caught:
        recompute(network(), ["blocks.*", "block.1.norms"])
    assert str(caught.value) == "checkpoint_activations: 'block.1.norms' matches no module of the model"
    assert caught.value.hint.startswith("nearest module names: blocks.1.norm")
    assert "blocks.1.norm" in caught.value.hint


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_training_with_less_memory_on_gpu() -> None:
    plain, saved = network().cuda(), network().cuda()
    recompute(saved, ["blocks.*"])
    losses = [train(model, device="cuda") for model in (plain, saved)]
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert_same(plain, saved)
    kept = []
    for model in (plain, saved):
        before = torch.cuda.memory_allocated()
        output = model(torch.randn(512, 4, 8, device="cuda"))
        kept.append(torch.cuda.memory_allocated() - before)
        del output
    assert kept[1] < 0.6 * kept[0]
