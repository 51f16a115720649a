"""Optimizer state by name against torch's own state_dict, also when the groups are others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import InvalidData
from paceline.optim import state

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(torch.full((2, 4), 0.1 * step)).square().sum().backward()
        optimizer.step()


def names(net: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_goes_on_bitwise_also_with_other_groups(kind: str) -> None:
    whole = model()
    optimizer = OPTIMIZERS[kind](whole.parameters())
    train(whole, optimizer, range(6))
    first = model()
    optimizer = OPTIMIZERS[kind](first.parameters())
    train(first, optimizer, range(3))
    tensors, plain = state.pack(optimizer, names(first))
    second = model()
    second.load_state_dict(first.state_dict())
    resumed = OPTIMIZERS[kind]([{"params": second[1].parameters()}, {"params": second[0].parameters()}])
    state.unpack(resumed, names(second), tensors, plain)
    train(second, resumed, range(3, 6))
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_state_of_other_parameters_is_refused() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer, range(1))
    tensors, plain = state.pack(optimizer, names(net))
    part = torch.optim.Adam(net[0].parameters())
    kept = {parameter: name for parameter, name in names(net).items() if name.startswith("0.")}
    with pytest.raises(state.StateMisfit, match=r"1\.bias"):
        state.unpack(part, kept, tensors, plain)


def test_state_that_is_no_tensor_and_no_value_is_named() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net[0].weight]["history"] = [1, 2]
    with pytest.raises(InvalidData, match="SGD keeps a list as 'history'"):
        state.pack(optimizer, names(net))
