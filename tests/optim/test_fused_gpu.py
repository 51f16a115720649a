"""NovoGrad, LARC and clipping by kernels on a real GPU: against torch's kernels, bitwise in every run, in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.optim.clip import ClipNorm
from paceline.optim.larc import Larc, Rule
from paceline.optim.novograd import NovoGrad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch says of its own sync debug mode that it is a prototype
]
SHAPES = [(512, 512, 1), (512, 1, 75), (512,), (3, 5, 7), (1,), (1024, 512, 1), (29,)]
RULE = Rule("clip", 0.02, decay_inside=True, zero="skip")
VARIANTS: list[dict[str, Any]] = [{}, {"amsgrad": True, "grad_averaging": True}, {"luc": True}]


def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    dice = torch.Generator("cuda").manual_seed(seed)
    drawn = [torch.randn(shape, generator=dice, device="cuda") * 0.05 for shape in SHAPES]
    return [each.to(dtype).requires_grad_() for each in drawn]


def give(parameters: list[Tensor], step: int) -> None:
    for parameter, gradient in zip(parameters, make(parameters[0].dtype, 100 + step), strict=True):
        parameter.grad = gradient.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_as_torchs_kernels(variant: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs, again = make(dtype), make(dtype), make(dtype)
    made = [
        (parameters, NovoGrad(parameters, lr=0.02, weight_decay=0.01, fused=fused, **variant))
        for parameters, fused in ((ours, None), (theirs, False), (again, None))
    ]
    assert [optimizer.way for _, optimizer in made] == ["Triton", "torch foreach", "Triton"]
    for (_, optimizer), fused in zip(made, (None, False, None), strict=True):
        Larc(optimizer, RULE, fused=fused)
    for step in range(4):
        for parameters, optimizer in made:
            give(parameters, step)
            optimizer.step()
    for mine, other, same in zip(ours, theirs, again, strict=True):
        torch.testing.assert_close(mine, other, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
        assert torch.equal(mine, same)


def test_no_device_sync() -> None:
    parameters = make()
    optimizer, clip = NovoGrad(parameters, lr=0.02), ClipNorm(0.1)
    Larc(optimizer, RULE)
    for step in range(3):
        give(parameters, step)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            clip.scale(parameters, clip.norm(gradients))
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("in_place", [True, False], ids=["gradients stay", "gradients of the graph"])
def test_a_captured_update_follows_the_rate(in_place: bool) -> None:
    """Replayed with new gradients and rates it does what a plain one does, to the bit."""
    ours, theirs = make(), make()
    rate = torch.tensor(0.02, device="cuda")
    captured, plain = NovoGrad(ours, lr=rate, weight_decay=0.01), NovoGrad(theirs, lr=0.02, weight_decay=0.01)
    clips = ClipNorm(0.5), ClipNorm(0.5)
    Larc(captured, RULE)
    Larc(plain, RULE)
    inputs = [parameter.detach().clone() for parameter in ours]

    def update(optimizer: NovoGrad, clip: ClipNorm, parameters: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        clip.scale(parameters, clip.norm(gradients))
        optimizer.step()

    def step() -> None:
        for parameter, value in zip(ours, inputs, strict=True):
            if in_place and parameter.grad is not None:
                parameter.grad.copy_(value)
            else:
                parameter.grad = value * 1.0
        update(captured, clips[0], ours)

    def fill(number: int) -> None:
        give(theirs, number)
        for place, parameter in zip(inputs, theirs, strict=True):
            assert parameter.grad is not None
            place.copy_(parameter.grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fill(0)
        step()  # Triton compiles, state begins
    torch.cuda.synchronize()
    update(plain, clips[1], theirs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number, lr in ((1, 0.02), (2, 0.001), (3, 0.5)):
        fill(number)
        rate.fill_(lr)
        plain.param_groups[0]["lr"] = lr
        graph.replay()
        update(plain, clips[1], theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
