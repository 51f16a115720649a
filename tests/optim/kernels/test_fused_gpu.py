"""NovoGrad, AdamW, LARC and clipping by kernels on a GPU: against torch's kernels, bitwise in every run, in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.optim.adamw import AdamW
from paceline.optim.clip import ClipNorm
from paceline.optim.finite import FiniteCheck
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


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)], ids=str)
def test_adamw_as_torchs_fused_kernel(betas: tuple[float, float]) -> None:
    """Within rounding of float64, as torch's own is; the same bits in every run, with torch's state."""
    ours, again, theirs = make(), make(), make()
    exact = [each.detach().double().requires_grad_() for each in ours]
    made = [
        (ours, AdamW(ours, lr=0.02, betas=betas, fused=True)),
        (again, AdamW(again, lr=0.02, betas=betas, fused=True)),
        (theirs, torch.optim.AdamW(theirs, lr=0.02, betas=betas, fused=True)),
        (exact, torch.optim.AdamW(exact, lr=0.02, betas=betas, fused=True)),
    ]
    for step in range(6):
        for parameters, optimizer in made:
            give(parameters, step)
            if parameters is exact:
                for parameter, gradient in zip(exact, make(seed=100 + step), strict=True):
                    parameter.grad = gradient.detach().double()
            skipped = torch.full((), float(step == 3), device="cuda")
            optimizer.found_inf, optimizer.grad_scale = skipped, None  # type: ignore[attr-defined]
            optimizer.step()
    tables = made[0][1]._tables._recent  # type: ignore[attr-defined]
    assert tables, "our kernel was not used"
    for mine, same, other, wanted in zip(ours, again, theirs, exact, strict=True):
        assert torch.equal(mine, same)
        # Of each of five steps, weights are rounded, and the update, which is of the size of the rate, four times.
        bound = 5 * torch.finfo(torch.float32).eps * (float(wanted.detach().abs().max()) + 4 * 0.02)
        assert float((mine - wanted).detach().abs().max()) <= bound
        assert float((other - wanted).detach().abs().max()) <= bound
        first, second = made[0][1].state[mine], made[2][1].state[other]
        assert first.keys() == second.keys()
        for name, value in first.items():
            # A mean of gradients of either sign is near 0 here and there: what is rounded is the gradients.
            torch.testing.assert_close(value, second[name], rtol=1e-6, atol=2e-8)


def test_adamw_and_the_check_leave_neighbours_alone() -> None:
    """Weights, gradients and moments that lie between nan, of sizes that end within a chunk."""
    room = torch.full((5, 30_000), torch.nan, device="cuda")
    sizes, start, cut = (1, 2047, 2048, 2049, 5000), 16, []
    for size in sizes:
        cut.append((start, size))
        start += -(-size // 16) * 16 + 16
    rows = [[row[begin : begin + size] for begin, size in cut] for row in room]
    weights = [torch.nn.Parameter(each.fill_(0.5)) for each in rows[0]]
    optimizer = AdamW(weights, lr=0.1, fused=True)
    for number, weight in enumerate(weights):
        weight.grad = rows[1][number].fill_(1.0)
        optimizer.state[weight] = {
            "step": torch.zeros((), device="cuda"),
            "exp_avg": rows[2][number].zero_(),
            "exp_avg_sq": rows[3][number].zero_(),
        }
    num_nan = int(room.isnan().sum())
    found_inf = torch.zeros((), device="cuda")
    assert FiniteCheck().find_inf([weight.grad for weight in weights if weight.grad is not None], found_inf)
    assert not bool(found_inf)
    optimizer.step()
    assert int(room.isnan().sum()) == num_nan
    for weight in weights:
        torch.testing.assert_close(weight, torch.full_like(weight, 0.5 * (1 - 0.1 * 0.01) - 0.1))
    rows[1][4][4999] = torch.inf
    assert FiniteCheck().find_inf([weight.grad for weight in weights if weight.grad is not None], found_inf)
    assert bool(found_inf)
