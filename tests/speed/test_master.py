"""fp16 weights with fp32 masters against the loop written out by hand."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.speed.master import Masters, cast_inputs, to_half

SCALE = 1024.0


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    model.register_buffer("offset", torch.ones(2))
    return model


def batches(count: int = 6) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, 8, generator=draw) for _ in range(count)]


def by_hand(data: list[torch.Tensor], lr: float) -> tuple[list[torch.Tensor], nn.Module]:
    """Micikevicius et al. 2018: fp16 copy for forward and backward, fp32 weights for the update; SGD with momentum."""
    model = network()
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    momenta = [torch.zeros_like(master) for master in masters]
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Linear)):
            module.half()
    for batch in data:
        model.zero_grad()
        (model(batch.half()).float().square().sum() * SCALE).backward()
        for parameter, master, momentum in zip(model.parameters(), masters, momenta, strict=True):
            momentum.mul_(0.9).add_(parameter.grad.float() * (1 / SCALE))
            master.add_(momentum, alpha=-lr)
            parameter.data.copy_(master)
    return masters, model


def test_bitwise_as_the_hand_written_loop() -> None:
    data = batches()
    expected_masters, expected_model = by_hand(data, lr=0.05)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    masters = Masters(model, optimizer)
    cast_inputs(model, torch.float16)
    for batch in data:
        model.zero_grad()
        (model(batch).float().square().sum() * SCALE).backward()
        masters.pull_gradients()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1 / SCALE)
        optimizer.step()
        masters.push_weights()

    for (name, parameter), expected, rounded in zip(
        model.named_parameters(), expected_masters, expected_model.parameters(), strict=True
    ):
        assert torch.equal(parameter, rounded)
        assert torch.equal(masters.tensors.get(name, parameter.detach()), expected)
    assert torch.equal(model[1].running_var, expected_model[1].running_var)
    assert set(masters.tensors) == {"0.weight", "0.bias", "4.weight", "4.bias"}


def test_dtypes_after_casting() -> None:
    model = network()
    Masters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        expected = torch.float32 if isinstance(module, _BatchNorm) else torch.float16
        assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} <= {expected}
    pure = network()
    to_half(pure)
    floating = [tensor for tensor in pure.state_dict().values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floating} == {torch.float16}


def test_masters_start_unrounded_and_keep_optimizer_state_and_groups() -> None:
    model = network()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[4].parameters()]}],
        lr=0.2,
        momentum=0.9,
    )
    model(batches(1)[0]).sum().backward()
    optimizer.step()
    momentum = {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in model.named_parameters()}
    after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert not torch.equal(before["0.weight"], after["0.weight"])

    masters = Masters(model, optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [parameter.dtype for parameter in held] == [torch.float32] * 6
    for (name, parameter), entry in zip(model.named_parameters(), held, strict=True):
        assert entry is masters.tensors.get(name, parameter)
        assert torch.equal(entry, after[name])
        assert optimizer.state[entry]["momentum_buffer"] is momentum[name]
    assert len(optimizer.state) == 6


def test_load_rounds_the_model_from_the_masters() -> None:
    model = network()
    masters = Masters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fresh = {name: torch.full_like(master, 1 + 2**-13) for name, master in masters.tensors.items()}
    masters.load({**fresh, "1.weight": torch.zeros(4)})
    assert torch.equal(masters.tensors["4.weight"], fresh["4.weight"])
    assert torch.equal(model[4].weight, fresh["4.weight"].half())
    assert (model[1].weight == 1).all()


def test_release_gives_model_and_optimizer_back_in_fp32() -> None:
    """A model that is released and taken again trains on bitwise as one that was never released."""
    runs = []
    for is_released in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        masters = Masters(model, optimizer)
        for number, batch in enumerate(batches()):
            if is_released and number == 3:
                masters.release()
                assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
                own = [id(parameter) for parameter in model.parameters()]
                assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == own
                assert {id(parameter) for parameter in optimizer.state} == set(own)
                masters = Masters(model, optimizer)
            model.zero_grad()
            model(batch.half()).float().square().sum().backward()
            masters.pull_gradients()
            optimizer.step()
            masters.push_weights()
        runs.append((masters.tensors, model.state_dict()))
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_frozen_and_unused_weights_and_tied_weights() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "tied": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    model["tied"].weight = model["used"].weight
    model["used"].bias.requires_grad_(False)
    frozen = model["used"].bias.detach().clone()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    masters = Masters(model, optimizer)
    assert model["tied"].weight is model["used"].weight
    assert torch.equal(masters.tensors["used.bias"], frozen)
    model["tied"](model["used"](torch.ones(2, 3).half())).sum().backward()
    masters.pull_gradients()
    assert masters.tensors["unused.weight"].grad is None
    assert masters.tensors["used.bias"].grad is None
    assert torch.equal(masters.tensors["used.weight"].grad, model["used"].weight.grad.float())
    optimizer.zero_grad()
    masters.pull_gradients()
    assert torch.equal(masters.tensors["used.weight"].grad, model["used"].weight.grad.float())


def test_inputs_are_cast_wherever_they_are_nested() -> None:
    pair = namedtuple("pair", ["features", "lengths"])
    seen = {}

    class Echo(nn.Module):
        def forward(self, first: object, *, other: object) -> None:
            seen.update(first=first, other=other)

    model = Echo()
    handle = cast_inputs(model, torch.float16)
    lengths = torch.tensor([3])
    model(pair(torch.ones(2), lengths), other={"a": [torch.ones(1).double(), (torch.ones(1), "text", None)]})
    assert isinstance(seen["first"], pair)
    assert seen["first"].features.dtype == torch.float16
    assert seen["first"].lengths is lengths
    inner = seen["other"]["a"]
    assert inner[0].dtype == inner[1][0].dtype == torch.float16
    assert inner[1][1:] == ("text", None)
    handle.remove()
    model(torch.ones(1), other=None)
    assert seen["first"].dtype == torch.float32


def check_batch_norm(device: torch.device) -> None:
    """fp16 in and out, fp32 inside: within fp16 rounding of the same layer run wholly in float64."""
    layer = nn.BatchNorm1d(4).to(device)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(16, 4, 9, device=device).half()
    for training in (True, False):
        layer.train(training)
        exact.train(training)
        one, other = x.clone().requires_grad_(), x.double().requires_grad_()
        out, expected = layer(one), exact(other)
        assert out.dtype == torch.float16
        torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
        out.float().square().sum().backward()
        expected.square().sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert one.grad.dtype == torch.float16
        torch.testing.assert_close(layer.weight.grad.double(), exact.weight.grad, rtol=1e-3, atol=0.05)
    torch.testing.assert_close(layer.running_var.double(), exact.running_var, rtol=1e-5, atol=0)


def test_fp32_batch_norm_between_fp16_layers_on_cpu() -> None:
    check_batch_norm(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp32_batch_norm_between_fp16_layers_on_gpu() -> None:
    check_batch_norm(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_masters_never_wait_for_the_gpu() -> None:
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    masters = Masters(model, optimizer)
    cast_inputs(model, torch.float16)
    data = [batch.cuda() for batch in batches()]
    model(data[0]).float().sum().backward()  # cuDNN and the allocator start up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data:
            model.zero_grad()
            (model(batch).float().square().sum() * SCALE).backward()
            masters.pull_gradients()
            torch._foreach_mul_([p.grad for group in optimizer.param_groups for p in group["params"]], 1 / SCALE)
            optimizer.step()
            masters.push_weights()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, _ = by_hand(batches(), lr=0.05)
    for (name, parameter), reference in zip(model.named_parameters(), expected, strict=True):
        actual = masters.tensors.get(name, parameter.detach()).cpu()
        torch.testing.assert_close(actual, reference, rtol=0.02, atol=0.02)
