"""The weight average against a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.optim.ema import WeightAverage

DECAY = 0.9


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, num_steps: int, after_step: object = None) -> None:
    update = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(num_steps):
        torch.manual_seed(step)
        update.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        update.step()
        if callable(after_step):
            after_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_update_as_a_plain_loop(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    torch.set_default_dtype(dtype)
    try:
        average = WeightAverage(model, DECAY)
        expected = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}

        def plain() -> None:
            average.update()
            for name, parameter in model.named_parameters():
                expected[name] = DECAY * expected[name] + (1 - DECAY) * parameter.detach().double()

        train(model, 10, plain)
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(average.tensors) == set(expected)
    for name, tensor in average.tensors.items():
        assert tensor.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        torch.testing.assert_close(tensor.double(), expected[name], rtol=tolerance, atol=tolerance)


def test_a_half_precision_model_has_an_fp32_average() -> None:
    weight = nn.Parameter(torch.ones(3).half())
    average = WeightAverage({"w": weight}, 0.99)
    weight.data.fill_(1.0009765625)  # the next fp16 after 1: a step in fp16 would round to nothing
    for _ in range(100):
        average.update()
    expected = 1 + 0.0009765625 * (1 - 0.99**100)
    torch.testing.assert_close(average.tensors["w"], torch.full((3,), expected), rtol=1e-5, atol=0)


def test_swapped_puts_the_average_in_and_the_weights_back_bitwise() -> None:
    model = network()
    average = WeightAverage(model, DECAY)
    train(model, 3, average.update)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = [id(parameter) for parameter in model.parameters()]

    def check_restored() -> None:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
        assert [id(parameter) for parameter in model.parameters()] == objects

    with average.swapped(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, average.tensors[name])
            assert not torch.equal(parameter, weights[name])
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, weights[name])
    check_restored()

    def fail_inside() -> None:
        with average.swapped(model):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    check_restored()
    model[0].weight.sum().backward()
    assert model[0].weight.grad is not None


def test_state_continues_bitwise() -> None:
    whole, parts = network(), network()
    one, other = WeightAverage(whole, DECAY), WeightAverage(parts, DECAY)
    train(whole, 3, one.update)
    train(parts, 3, other.update)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    resumed = WeightAverage(parts, DECAY)
    resumed.load_state_dict(state)
    train(whole, 3, one.update)
    train(parts, 3, resumed.update)
    assert all(torch.equal(tensor, resumed.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_update_never_waits_for_the_gpu(dtype: torch.dtype) -> None:
    weight = torch.ones(1000, device="cuda", dtype=dtype)
    average = WeightAverage({"w": weight}, 0.5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        weight.fill_(3.0)
        average.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert average.tensors["w"].unique().tolist() == [2.0]
