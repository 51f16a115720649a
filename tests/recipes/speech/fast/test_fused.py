"""An encoder trained through the kernels, by their reference on the CPU, beside the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.recipes.speech.fast import fused
from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet import ops
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.network.encoder import Encoder
from paceline.speed.autotune.choice import CannotRun
from paceline.speed.layers.kernels import ways
from tests.recipes.speech.kernels.quartznet.separable import distance, make_case

BLOCKS: list[dict[str, Any]] = [
    {"filters": 32, "kernel": 5, "stride": 2, "separable": True},
    {"filters": 32, "kernel": 7, "repeat": 2, "residual": True, "separable": True},
    {"filters": 48, "kernel": 9, "repeat": 3, "residual": True, "separable": True},
    {"filters": 32, "kernel": 7, "dilation": 2, "separable": True},
    {"filters": 64, "kernel": 1},
]
MELS, LENGTHS = torch.randn(4, 64, 61, generator=torch.Generator().manual_seed(0)), torch.tensor([61, 50, 33, 7])


def make_encoder(blocks: list[dict[str, Any]] = BLOCKS, **more: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(read_network({"features": {"n_fft": 512}, "blocks": blocks, **more})).train()


def trained(encoder: Encoder, out: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs that mean something, and gradients."""
    mask = (torch.arange(out.shape[-1]) < lengths[:, None])[:, None]
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((out * factors * mask).sum(), list(encoder.parameters()))
    return (out * mask).detach(), list(gradients)


def assert_same(
    plain: Encoder,
    ours: Encoder,
    encode: Callable[[Encoder, Tensor, Tensor], Any],
    mels: Tensor = MELS,
    lengths_in: Tensor = LENGTHS,
) -> None:
    """Outputs, gradients and running statistics of a training pass in float64."""
    out, lengths = plain(mels.double(), lengths_in)
    found, after = encode(ours, mels.double(), lengths_in)
    assert torch.equal(lengths, after)
    expected, gradients = trained(plain, out, lengths)
    result, ours_gradients = trained(ours, found, after)
    assert distance(result, expected) < 1e-12
    names = [name for name, _ in plain.named_parameters()]
    for name, gradient, wanted in zip(names, ours_gradients, gradients, strict=True):
        assert distance(gradient, wanted) < 1e-10, name
    for (name, buffer), wanted in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert distance(buffer, wanted) < 1e-12, name


@pytest.mark.parametrize("conv_mask", [True, False])
@pytest.mark.parametrize(
    "blocks",
    [BLOCKS, BLOCKS[:3], [{"filters": 16, "kernel": 1, "residual": True}, BLOCKS[1]]],
    ids=["all", "joined", "1x1"],
)
def test_same_as_the_plain_encoder(blocks: list[dict[str, Any]], conv_mask: bool) -> None:
    plain = make_encoder(blocks, conv_mask=conv_mask).double()
    ours = copy.deepcopy(plain)
    assert_same(plain, ours, fused.encode)


@pytest.mark.parametrize("blocks", [BLOCKS, BLOCKS[:3]], ids=["all", "joined"])
def test_utterances_that_lie_by_length_come_back_in_their_places(
    blocks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "STREAM_ROWS", 3)
    plain = make_encoder(blocks).double()
    ours = copy.deepcopy(plain)
    with ways.using(ways.Ways(sorted=True)):
        assert_same(plain, ours, fused.encode, MELS, torch.tensor([33, 61, 7, 50]))


def test_stands_in_for_training_in_bfloat16_only() -> None:
    plain = make_encoder()
    ours = copy.deepcopy(plain)
    assert fused.accelerate(ours) == []
    assert list(ours.state_dict()) == list(plain.state_dict())
    for training, dtype in ((True, None), (True, torch.float16), (False, torch.bfloat16)):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None), torch.no_grad():
            outs = [encoder.train(training)(MELS, LENGTHS)[0] for encoder in (ours, plain)]
        assert torch.equal(*outs)
    assert all(torch.equal(*pair) for pair in zip(ours.buffers(), plain.buffers(), strict=True))
    exact = copy.deepcopy(plain).double()
    with torch.autocast("cpu", torch.bfloat16):
        outs = [encoder.train()(MELS, LENGTHS) for encoder in (ours, plain)]
    assert not torch.equal(outs[0][0], outs[1][0])
    expected, gradients = trained(exact.train(), *exact(MELS.double(), LENGTHS))
    far = []
    for encoder, out in zip((ours, plain), outs, strict=True):
        result, found = trained(encoder, *out)
        far.append(distance(torch.cat([each.flatten() for each in found]), torch.cat([g.flatten() for g in gradients])))
        assert distance(result, expected) < 3e-2
    assert far[0] < 1.2 * far[1]


def test_a_copy_trains_itself() -> None:
    ours = make_encoder()
    fused.accelerate(ours)
    other = copy.deepcopy(ours)
    before = [buffer.clone() for buffer in ours.buffers()]
    with torch.autocast("cpu", torch.bfloat16):
        other(MELS, LENGTHS)
    assert all(torch.equal(*pair) for pair in zip(before, ours.buffers(), strict=True))
    assert int(other.get_buffer("blocks.0.layers.0.norm.num_batches_tracked")) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"separable": False}, "block 1: kernel 7 over all channels at once, not separable"),
        ({"groups": 2}, "block 1: 2 groups of channels"),
        ({"se": True}, "block 1: squeeze and excite"),
        ({"dropout": 0.1}, "block 1: dropout 0.1"),
        ({"residual_dense": True}, "block 1: residuals of several blocks"),
        ({"filters": 40}, "block 1: 40 filters, no multiple of 16"),
    ],
)
def test_says_what_it_cannot(change: dict[str, Any], why: str) -> None:
    encoder = make_encoder([BLOCKS[0], {**BLOCKS[1], **change}, *BLOCKS[2:]])
    assert why in fused.accelerate(encoder)
    assert "forward" not in vars(encoder)  # it stays as it was
    assert fused.accelerate(make_encoder(activation="swish")) == ["activation swish: the kernels know relu"]


def test_operators_keep_their_word() -> None:
    """Schemas, fakes and autograd are what PyTorch expects of operators."""
    case = make_case(5, batch=2, channels=16)
    weight, ones = torch.randn(32, 16, 1, requires_grad=True), torch.ones(32, requires_grad=True)
    x, depthwise = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    matrix = weight.detach().squeeze(2).to(x.dtype)
    for shortcut in ((None, None, None), (weight, ones, ones)):
        sample = (
            x,
            None,
            None,
            case.lengths_in,
            case.lengths_out,
            depthwise,
            weight,
            ones,
            ones,
            *shortcut,
            matrix,
            None if shortcut[0] is None else matrix,
            None,
            50,
            1,
            1,
            1e-3,
        )
        torch.library.opcheck(
            ops.separable.overload, sample, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )
    torch.library.opcheck(
        ops.pointwise.overload,
        (x, case.lengths_in, weight, ones, ones, matrix, None, 50, 1e-3),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_listed_products_take_the_place_of_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles reach every product that they are for, forward and backward; here plain PyTorch computes these."""
    product = pytest.importorskip("paceline.recipes.speech.kernels.quartznet.product", reason="the kernels need Triton")
    calls: list[str] = []

    def listed(x: Tensor, lengths: Tensor, frames: int) -> Tensor:
        calls.append(f"list {frames}")
        return lengths.clone()

    def forward(matrix: Tensor, x: Tensor, tiles_: Tensor, frames: int, *affine: Any) -> Any:
        calls.append("forward")
        y = ops._product(matrix, x)
        return y, product.Statistics(*ops._statistics(y, tiles_, frames, *affine))

    def data_gradient(matrix: Tensor, g: Tensor, tiles_: Tensor) -> Tensor:
        calls.append("data")
        return ops._product(matrix.t(), g)

    def weight_gradient(g: Tensor, x: Tensor, tiles_: Tensor) -> Tensor:
        calls.append("weight")
        return g.flatten(1) @ x.flatten(1).t()

    for function in (forward, data_gradient, weight_gradient):
        monkeypatch.setattr(product, function.__name__, function)
    for name in ("fits", "gains_backward", "gains_weights"):
        monkeypatch.setattr(product, name, lambda *shape: True)
    monkeypatch.setattr(ops, "listed", listed)
    plain = make_encoder().double()
    with ways.using(ways.Ways(listed=True, listed_weights=True)):
        assert_same(plain, copy.deepcopy(plain), fused.encode)
    products = sum(module.kernel_size == (1,) for module in plain.modules() if isinstance(module, torch.nn.Conv1d))
    assert {name: calls.count(name) for name in set(calls)} == {
        "list 31": 1,
        "forward": products,
        "data": products,
        "weight": products,
    }


def test_compiles_in_one_graph() -> None:
    ours = make_encoder()
    fused.accelerate(ours)
    with torch.autocast("cpu", torch.bfloat16):
        expected = trained(ours, *ours(MELS, LENGTHS))
        found = trained(ours, *torch.compile(ours, backend="aot_eager", fullgraph=True)(MELS, LENGTHS))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


def test_a_grain_past_32_bits_is_refused() -> None:
    fused.check_size(1024, 64, 1680)
    with pytest.raises(CannotRun, match="past 2\\^31 elements") as caught:
        fused.check_size(1024, 1300, 1680)
    assert isinstance(caught.value, PacelineError)  # no traceback, where a run meets it and not the contest of ways
    assert "set more `--grains` or a smaller batch, or `-O2`" in caught.value.hint
