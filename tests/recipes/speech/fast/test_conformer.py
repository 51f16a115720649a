"""A Conformer through our kernels is the plain one: outputs, gradients of all parameters, running statistics."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from paceline.recipes.speech.fast import conformer as fast
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.network.conformer.encoder import ConformerEncoder
from paceline.speed.layers.kernels import ways
from tests.recipes.speech.kernels.quartznet.separable import distance

WITHOUT_DROPOUT = {"dropout": 0.0, "dropout_pre_encoder": 0.0, "dropout_emb": 0.0, "dropout_att": 0.0}
SMALL = {
    "d_model": 16,
    "n_layers": 3,
    "n_heads": 2,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 128,
    "conv_kernel_size": 5,
}


def make(**changes: Any) -> ConformerEncoder:
    torch.manual_seed(1)
    settings = {**SMALL, **WITHOUT_DROPOUT, **changes}
    mels = 80 if settings["d_model"] > 64 else 13
    network = read_network({"features": {"num_mels": mels}, "conformer": settings})
    encoder = ConformerEncoder(network)
    for parameter in encoder.parameters():
        if parameter.dim() == 1 or "pos_bias" in str(parameter.shape):
            torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    for layer in encoder.layers:
        for bias in (layer.self_attn.pos_bias_u, layer.self_attn.pos_bias_v):
            torch.nn.init.normal_(bias)
    return encoder.train()


def heard(batch: int, frames: int, mels: int = 13) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(batch)
    lengths = torch.randint(1, frames + 1, (batch,), generator=dice)
    lengths[0] = frames
    return torch.randn(batch, mels, frames, generator=dice), lengths


def trained(
    encoder: ConformerEncoder, encode: Any, features: Tensor, lengths: Tensor, capture: tuple[int, ...] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output within the lengths, and gradients of a loss that reads no more."""
    out, after = encode(features, lengths, capture)
    out = out * (torch.arange(out.shape[2], device=out.device) < after[:, None]).repeat(1 + len(capture), 1)[:, None]
    dice = torch.Generator().manual_seed(3)
    weights = torch.randn(out.shape, generator=dice).to(out)
    encoder.zero_grad()
    (out.double() * weights.double()).sum().backward()
    return out.detach(), {name: parameter.grad for name, parameter in encoder.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "batch", "frames", "capture"),
    [
        ({}, 3, 61, ()),
        ({"subsampling": "striding", "subsampling_factor": 4, "untie_biases": False, "xscaling": False}, 2, 33, (0, 1)),
        ({"n_layers": 1}, 1, 8, ()),
    ],
)
def test_the_same_in_float64(changes: dict[str, Any], batch: int, frames: int, capture: tuple[int, ...]) -> None:
    plain = make(**changes).double()
    ours = copy.deepcopy(plain)
    features, lengths = heard(batch, frames)
    out, gradients = trained(plain, plain, features.double(), lengths, capture)
    found, of_ours = trained(ours, lambda *given: fast.encode(ours, *given), features.double(), lengths, capture)
    assert distance(found, out) < 1e-6  # positions are float32 in both
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((of_ours[name] - gradient).norm()) < 1e-7 * scale + 1e-6 * float(gradient.norm()), name
    for (name, buffer), (_, other) in zip(plain.named_buffers(), ours.named_buffers(), strict=True):
        assert torch.allclose(buffer, other, rtol=1e-5, atol=1e-7), name


def test_obstacles() -> None:
    assert fast.obstacles(make()) == []
    assert fast.obstacles(make(conv_norm_type="layer_norm")) == ["conv_norm_type layer_norm"]
    encoder = make(use_bias=False, stochastic_depth_drop_prob=0.2)
    assert fast.accelerate(encoder) == ["no biases", "layers that are left out"]
    assert "forward" not in encoder.__dict__


def test_only_training_in_bfloat16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = make()
    assert fast.accelerate(encoder) == []
    calls: list[torch.dtype] = []
    encode = fast.encode

    def noted(encoder: ConformerEncoder, features: Tensor, *given: Any) -> Any:
        calls.append(features.dtype)
        return encode(encoder, features, *given)

    monkeypatch.setattr(fast, "encode", noted)
    features, lengths = heard(2, 40)
    encoder(features, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        encoder(features, lengths)[0].sum().backward()
        encoder.eval()
        encoder(features, lengths)
    assert calls == [torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("batch", "frames"), [(4, 700), (1, 57)])
@pytest.mark.parametrize("aside", [False, True])
def test_on_a_gpu_as_near_to_float64_as_the_plain_way(batch: int, frames: int, aside: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        sizes = {"d_model": 256, "n_layers": 4, "n_heads": 4, "subsampling_conv_channels": 256, "conv_kernel_size": 9}
        exact = make(**sizes).double().cuda()
        features, lengths = (each.cuda() for each in heard(batch, frames, 80))
        out, gradients = trained(exact, exact, features.double(), lengths)
        results = []
        for accelerated in (False, True):
            encoder = copy.deepcopy(exact).float()
            if accelerated:
                assert fast.accelerate(encoder) == []
            way = replace(ways.MEASURED, aside=aside)
            with ways.using(way), torch.autocast("cuda", torch.bfloat16):
                results.append(trained(encoder, encoder, features, lengths))
        (plain_out, plain), (found_out, found) = results
        assert distance(found_out, out) < 1.5 * distance(plain_out, out) + 1e-3
        whole = torch.cat([gradient.flatten() for gradient in gradients.values()])
        of_plain, of_ours = (
            torch.cat([each[name].double().flatten() for name in gradients]) for each in (plain, found)
        )
        assert distance(of_ours, whole) < 1.5 * distance(of_plain, whole) + 1e-3
        # Some are zero but for rounding: that of a bias before batch norm, and of the keys' bias.
        scale = float(whole.norm())
        for name, gradient in gradients.items():
            allowed = 3 * (plain[name].double() - gradient).norm() + 0.02 * gradient.norm() + 1e-3 * scale
            assert (found[name].double() - gradient).norm() <= allowed, name
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_grain_past_32_bits_goes_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same weights, within a run whose other grains go through the kernels; it is said once."""
    plain = make()
    ours = copy.deepcopy(plain)
    assert fast.accelerate(ours) == []
    monkeypatch.setattr(fast, "MOST_ELEMENTS", 3 * 13 * 61)
    monkeypatch.setattr(fast, "_is_plain_said", False)
    features, lengths = heard(3, 61)
    with torch.autocast("cpu", torch.bfloat16):
        out, gradients = trained(plain, plain, features, lengths)
        for _ in range(2):
            found, own = trained(ours, ours, features, lengths)
            assert torch.equal(found, out)
            assert all(torch.equal(own[name], gradient) for name, gradient in gradients.items())
    errors = capsys.readouterr().err
    assert errors.count("a grain of 3 utterances of 61 frames is past the 2^31 elements of the kernels") == 1
    assert errors.count("\n") == 1
