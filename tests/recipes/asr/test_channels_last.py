"""An encoder trained with channels last in memory, beside the plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.recipes.asr import channels_last
from paceline.recipes.asr.accelerate import accelerate
from paceline.recipes.asr.encoder import Encoder
from paceline.recipes.asr.network import read_network
from tests.recipes.asr.test_fused import LENGTHS, MELS, assert_same, make_encoder
from tests.speed.kernels.separable import distance

DENSE: dict[str, Any] = {"repeat": 2, "residual": True, "residual_dense": True}
BLOCKS: list[dict[str, Any]] = [
    {"filters": 32, "kernel": 11, "stride": 2},
    {"filters": 32, "kernel": 11, **DENSE},
    {"filters": 48, "kernel": 13, **DENSE},
    {"filters": 32, "kernel": 7, "dilation": 2},
    {"filters": 64, "kernel": 1},
]


@pytest.mark.parametrize("conv_mask", [True, False])
@pytest.mark.parametrize(
    "change",
    [{}, {"separable": True}, {"groups": 2}, {"se": True}],
    ids=["jasper", "separable", "groups", "excited"],
)
def test_same_as_the_plain_encoder(change: dict[str, Any], conv_mask: bool) -> None:
    blocks = [BLOCKS[0], {**BLOCKS[1], **change}, *BLOCKS[2:]]
    plain = make_encoder(blocks, conv_mask=conv_mask).double()
    ours = copy.deepcopy(plain)
    channels_last.accelerate(ours)
    assert_same(plain, ours, channels_last.encode)


def test_no_layer_leaves_the_layout() -> None:
    """One that did would cost copies, forth and back, and nobody would notice."""
    encoder = make_encoder([{**block, "dropout": 0.2} for block in BLOCKS])
    accelerate(encoder)
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Conv1d | nn.BatchNorm1d | nn.ReLU | nn.Dropout):

            def seen(_: nn.Module, inputs: tuple[Tensor], output: Tensor, name: str = name) -> None:
                assert inputs[0].stride(1) == output.stride(1) == 1, name
                output.register_hook(lambda gradient: check(gradient, name))

            module.register_forward_hook(seen)

    def check(gradient: Tensor, name: str) -> None:
        assert gradient.stride(1) == 1, f"gradient of {name}"

    with torch.autocast("cpu", torch.bfloat16):
        out, _ = encoder(MELS, LENGTHS)
    out.float().square().sum().backward()


def test_stands_in_for_training_in_bfloat16_only() -> None:
    plain = make_encoder(BLOCKS)
    ours = copy.deepcopy(plain)
    (line,) = accelerate(ours)
    assert line.startswith("block 0: kernel 11 over all channels at once, not separable and ")
    assert list(ours.state_dict()) == list(plain.state_dict())
    for training, dtype in ((True, None), (True, torch.float16), (False, torch.bfloat16)):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None), torch.no_grad():
            outs = [encoder.train(training)(MELS, LENGTHS)[0] for encoder in (ours, plain)]
        assert torch.equal(*outs)
        assert outs[0].stride(1) > 1
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ours.train()(MELS, LENGTHS)
    assert out.stride(1) == 1


def test_frozen_batch_norm_stays_frozen() -> None:
    ours = make_encoder(BLOCKS)
    accelerate(ours)
    norm = ours.get_submodule("blocks.1.layers.0.norm").eval()
    with torch.autocast("cpu", torch.bfloat16):
        ours(MELS, LENGTHS)
    assert int(norm.get_buffer("num_batches_tracked")) == 0
    assert torch.equal(norm.get_buffer("running_mean"), torch.zeros(32))
    assert int(ours.get_buffer("blocks.1.layers.1.norm.num_batches_tracked")) == 1


def test_dropout_is_as_often() -> None:
    encoder = make_encoder([{"filters": 512, "kernel": 3, "dropout": 0.3}])
    accelerate(encoder)
    (dropout,) = (module for module in encoder.modules() if isinstance(module, nn.Dropout))
    x = torch.ones(4, 50, 512).transpose(1, 2)
    out = dropout(x)
    assert out.stride() == x.stride()
    assert float((out == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
    assert torch.equal(dropout.eval()(x), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_as_right_as_the_plain_one_on_a_gpu() -> None:
    torch.manual_seed(0)
    network = read_network({"features": {"n_fft": 512}, "blocks": BLOCKS})
    plain = Encoder(network).cuda().train()
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    accelerate(ours)
    mels, lengths = torch.randn(16, 64, 333, device="cuda"), torch.randint(100, 334, (16,), device="cuda")
    factors = torch.randn(16, 64, 167, device="cuda", dtype=torch.float64)

    def gradient(encoder: Encoder, mels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=mels.dtype is torch.float32):
            out, after = encoder(mels, lengths)
        held = torch.arange(167, device="cuda") < after[:, None, None]
        found = torch.autograd.grad((out * factors * held).sum(), list(encoder.parameters()))
        return torch.cat([each.flatten().double() for each in found])

    expected = gradient(exact, mels.double())
    assert distance(gradient(ours, mels), expected) <= 1.2 * distance(gradient(plain, mels), expected)
