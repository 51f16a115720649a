"""The encoder against a reconstruction from the YAML alone, in plain PyTorch; exact sizes, lengths, and no padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from paceline.recipes.speech.network.config import NetworkSettings, read_network, shipped_names
from paceline.recipes.speech.network.encoder import Decoder, Encoder, weight_shapes
from paceline.recipes.speech.network.separable import SeparableConv, SubBlock

ALL_KEYS = """
activation: swish
features: {num_mels: 12}
blocks:
  - {filters: 16, kernel: 5, stride: 2, separable: true}
  - {filters: 16, kernel: 7, repeat: 3, residual: true, separable: true, groups: 4}
  - {filters: 24, kernel: 3, repeat: 2, residual: true, groups: 2, se: true, se_reduction_ratio: 8}
  - {filters: 24, kernel: 5, repeat: 2, residual: true, residual_dense: true, separable: true}
  - {filters: 20, kernel: 3, repeat: 2, residual: true, residual_dense: true}
  - {filters: 16, kernel: 5, repeat: 2, residual: true, residual_dense: true, se: true, se_reduction_ratio: 4}
  - {filters: 16, kernel: 3, stride: 3}
  - {filters: 16, kernel: 3, residual: true, residual_dense: true}
  - {filters: 16, kernel: 9, dilation: 4, separable: true, se: true, se_reduction_ratio: 2}
  - {filters: 12, kernel: 3, dilation: 5, groups: 2}
"""


def shipped_text(name: str) -> str:
    from importlib import resources

    return (resources.files("paceline.recipes.speech.network") / "shipped" / f"{name}.yaml").read_text()


def narrow(name: str, factor: int) -> str:
    """A shipped file with fewer channels and without dropout, as text."""
    described = yaml.safe_load(shipped_text(name))
    for block in described["blocks"]:
        block["filters"] //= factor
        block["dropout"] = 0.0
    return yaml.safe_dump(described)


def randomized(network: NetworkSettings, dtype: torch.dtype = torch.float64) -> tuple[Encoder, Decoder]:
    """A model whose batch norms have something to say."""
    torch.manual_seed(0)
    encoder, decoder = Encoder(network), Decoder(network.channels[-1], network.num_classes)
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.get_buffer("running_mean"), std=0.2)
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2.0)
    return encoder.to(dtype), decoder.to(dtype)


def batch(network: NetworkSettings, lengths: list[int], width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Features with noise behind the end of each utterance."""
    torch.manual_seed(1)
    assert max(lengths) <= width
    return torch.randn(len(lengths), network.features.num_mels, width, dtype=dtype)


def reconstruct(
    described: dict[str, Any], weights: dict[str, Tensor], x: Tensor, lengths: list[int], *, training: bool
) -> tuple[Tensor, list[int]]:
    """What the YAML says, as functions: every length is counted, every convolution is preceded by a cut."""
    activation = {"relu": F.relu, "swish": F.silu}[described.get("activation", "relu")]

    def cut(x: Tensor, lengths: list[int]) -> Tensor:
        return torch.stack(
            [F.pad(row[:, :length], (0, x.shape[-1] - length)) for row, length in zip(x, lengths, strict=True)]
        )

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = weights[f"{name}.running_mean"].clone(), weights[f"{name}.running_var"].clone()
        return F.batch_norm(
            x, mean, var, weights[f"{name}.weight"], weights[f"{name}.bias"], training, momentum=0.1, eps=1e-3
        )

    dense: list[Tensor] = []
    for index, block in enumerate(described["blocks"]):
        place = f"encoder.blocks.{index}"
        kernel, stride, dilation = block["kernel"], block.get("stride", 1), block.get("dilation", 1)
        groups, filters = block.get("groups", 1), block["filters"]
        shape = {"stride": stride, "dilation": dilation, "padding": dilation * (kernel // 2)}
        dense = [*dense, x] if block.get("residual_dense") else []
        before, added = lengths, dense or [x]
        lengths = [-(-length // stride) for length in lengths]
        for number in range(block.get("repeat", 1)):
            layer = f"{place}.layers.{number}"
            x = cut(x, before if number == 0 else lengths)
            if block.get("separable"):
                x = F.conv1d(x, weights[f"{layer}.depthwise.weight"], groups=x.shape[1], **shape)
                x = F.conv1d(cut(x, lengths), weights[f"{layer}.pointwise.weight"], groups=groups)
            else:
                x = F.conv1d(x, weights[f"{layer}.conv.weight"], groups=groups, **shape)
            x = norm(x, f"{layer}.norm")
            if groups > 1:  # channel c of group g goes to place c * groups + g
                order = [g * (filters // groups) + c for c in range(filters // groups) for g in range(groups)]
                x = x[:, order]
            if number < block.get("repeat", 1) - 1:
                x = activation(x)
        if block.get("se"):
            means = torch.stack([row[:, :length].mean(-1) for row, length in zip(x, lengths, strict=True)])
            middle = activation(means @ weights[f"{layer}.excite.squeeze.weight"].T)
            x = x * torch.sigmoid(middle @ weights[f"{layer}.excite.expand.weight"].T)[:, :, None]
        if block.get("residual"):
            for number, pane in enumerate(added):
                name = f"{place}.residuals.{number}"
                x = x + norm(F.conv1d(cut(pane, before), weights[f"{name}.conv.weight"]), f"{name}.norm")
        x = activation(x)
    scores = F.conv1d(x, weights["decoder.conv.weight"], weights["decoder.conv.bias"])
    return torch.log_softmax(scores, 1).transpose(1, 2), lengths


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "text",
    [ALL_KEYS, narrow("quartznet5x5", 32), narrow("jasper10x5dr", 64), narrow("small", 16)],
    ids=["all keys", "quartznet5x5", "jasper10x5dr", "small"],
)
def test_equals_a_reconstruction_of_the_yaml(text: str, training: bool) -> None:
    described = yaml.safe_load(text)
    network = read_network(described)
    encoder, decoder = (part.train(training) for part in randomized(network))
    parts = {"encoder": encoder, "decoder": decoder}
    weights = {f"{part}.{name}": value.clone() for part, m in parts.items() for name, value in m.state_dict().items()}
    lengths = [61, 37, 1, 60]
    x = batch(network, lengths, 61)
    expected, expected_lengths = reconstruct(described, weights, x, lengths, training=training)
    encoded, found_lengths = encoder(x, torch.tensor(lengths))
    found = decoder(encoded)
    assert found_lengths.tolist() == expected_lengths == [network.output_length(length) for length in lengths]
    assert found.shape == expected.shape == (4, network.output_length(61), 29)
    for row, length in enumerate(expected_lengths):
        torch.testing.assert_close(found[row, :length], expected[row, :length], rtol=0, atol=1e-10)


SIZES = {
    "quartznet15x5": (18_894_656, 29_725),
    "jasper10x5dr": (332_632_349 - 29_725, 29_725),
    "jasper10x5": (322_286_877 - 29_725, 29_725),
    "quartznet12x1": (5_045_597 - 29_725, 29_725),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_published(name: str) -> None:
    network = read_network(name)
    with torch.device("meta"):
        parts = Encoder(network), Decoder(1024, network.num_classes)
    assert tuple(sum(p.numel() for p in part.parameters()) for part in parts) == SIZES[name]


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_network_can_be_built(name: str) -> None:
    shapes = weight_shapes(read_network(name))
    assert shapes["decoder.conv.bias"] == (29,)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("text", [ALL_KEYS, narrow("quartznet5x5", 32)], ids=["all keys", "quartznet5x5"])
def test_padding_never_changes_an_utterance(text: str, dtype: torch.dtype, tolerance: float) -> None:
    network = read_network(yaml.safe_load(text))
    encoder, decoder = (part.eval() for part in randomized(network, dtype))
    lengths = [96, 7, 33, 1, 95, 50]
    x = batch(network, lengths, 96, dtype)
    together = decoder(encoder(x, torch.tensor(lengths))[0])
    for row, length in enumerate(lengths):
        alone = decoder(encoder(x[row : row + 1, :, :length], torch.tensor([length]))[0])
        assert alone.shape[1] == network.output_length(length)
        torch.testing.assert_close(together[row, : alone.shape[1]], alone[0], rtol=0, atol=tolerance)


def test_nothing_behind_an_utterance_is_read_not_even_nan() -> None:
    network = read_network(yaml.safe_load(ALL_KEYS))
    encoder, _ = (part.eval() for part in randomized(network))
    x = batch(network, [20, 40], 40)
    clean = encoder(x, torch.tensor([20, 40]))[0]
    x[0, :, 20:] = torch.nan
    dirty = encoder(x, torch.tensor([20, 40]))[0]
    kept = network.output_length(20)
    assert torch.equal(clean[0, :, :kept], dirty[0, :, :kept])
    assert torch.equal(clean[1], dirty[1])


def test_without_masks_padding_is_seen() -> None:
    """`conv_mask: false` is obeyed: noise behind the end reaches the last frames."""
    network = read_network({"conv_mask": False, "blocks": [{"filters": 8, "kernel": 5, "separable": True}]})
    encoder, _ = (part.eval() for part in randomized(network))
    x = batch(network, [10], 12)
    padded = encoder(x, torch.tensor([10]))[0][:, :, :10]
    alone = encoder(x[:, :, :10], torch.tensor([10]))[0]
    assert torch.allclose(padded[:, :, :8], alone[:, :, :8])
    assert not torch.allclose(padded[:, :, 8:], alone[:, :, 8:])


@pytest.mark.parametrize("num_frames", [0, 1, 2, 3, 5, 6, 7, 16, 97])
def test_output_length_is_what_comes_out(num_frames: int) -> None:
    network = read_network(yaml.safe_load(ALL_KEYS))
    encoder, _ = randomized(network)
    encoder.eval()
    y, lengths = encoder(batch(network, [num_frames], max(num_frames, 1)), torch.tensor([num_frames]))
    assert lengths.tolist() == [encoder.output_length(num_frames)]
    assert y.shape[-1] == encoder.output_length(max(num_frames, 1))


def test_gradients_reach_every_weight_and_are_finite() -> None:
    network = read_network(yaml.safe_load(ALL_KEYS))
    encoder, decoder = randomized(network, torch.float32)
    lengths = [40, 3, 0]
    log_probs = decoder(encoder(batch(network, lengths, 40, torch.float32), torch.tensor(lengths))[0])
    log_probs[0, : network.output_length(40)].square().sum().backward()
    for part in (encoder, decoder):
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name


def test_dropout_is_drawn_in_training_only() -> None:
    network = read_network({"blocks": [{"filters": 64, "kernel": 1, "dropout": 0.5}]})
    encoder, _ = randomized(network)
    x = batch(network, [50], 50)
    encoder.eval()
    kept = encoder(x, torch.tensor([50]))[0]
    assert torch.equal(kept, encoder(x, torch.tensor([50]))[0])
    encoder.train()
    dropped = (encoder(x, torch.tensor([50]))[0] == 0).double().mean()
    undropped = (kept == 0).double().mean()
    assert 0.6 < dropped < 0.9
    assert undropped < 0.6


@pytest.mark.parametrize(
    ("mode", "bound"),
    [("xavier_uniform", (6 / (3 + 32 * 3)) ** 0.5), ("kaiming_uniform", (6 / 3) ** 0.5)],
)
def test_initial_weights_fill_the_range_of_their_formula(mode: str, bound: float) -> None:
    """A depthwise filter of 3 taps over 32 channels: fan in 3, fan out 32 * 3."""
    network = read_network(
        {"init_mode": mode, "features": {"num_mels": 32}, "blocks": [{"filters": 8, "kernel": 3, "separable": True}]}
    )
    torch.manual_seed(0)
    layer = Encoder(network).get_submodule("blocks.0.layers.0")
    assert isinstance(layer, SeparableConv)
    widest = layer.depthwise.weight.abs().max().item()
    assert 0.9 * bound < widest <= bound


def test_decoder_gives_float32_under_autocast() -> None:
    network = read_network("small")
    encoder, decoder = randomized(network, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        encoded, _ = encoder(batch(network, [50], 50, torch.float32), torch.tensor([50]))
        log_probs = decoder(encoded)
    assert encoded.dtype == torch.bfloat16
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(1, 13))


def test_compiles_into_one_graph() -> None:
    network = read_network(yaml.safe_load(ALL_KEYS))
    encoder, _ = randomized(network)
    encoder.eval()
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    for lengths in ([30, 12], [50, 49]):
        x = batch(network, lengths, lengths[0])
        found, expected = compiled(x, torch.tensor(lengths)), encoder(x, torch.tensor(lengths))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_another_forward_can_stand_in_for_a_separable_sub_block() -> None:
    """Same parameters, same state dict, all it needs in its arguments."""
    network = read_network(yaml.safe_load(narrow("quartznet5x5", 32)))
    encoder, _ = randomized(network)
    lengths = torch.tensor([41, 17])
    x = batch(network, [41, 17], 41)
    expected, names = encoder(x, lengths)[0], list(encoder.state_dict())
    seen = []

    def stand_in(layer: SeparableConv) -> Any:
        def forward(x: Tensor, before: Any, after: Any, residual: Tensor | None = None) -> Tensor:
            seen.append((layer.depthwise.kernel_size[0], residual is not None, after.lengths.tolist()))
            return SubBlock.forward(layer, x, before, after, residual)

        return forward

    for module in encoder.modules():
        if isinstance(module, SeparableConv):
            module.forward = stand_in(module)  # type: ignore[method-assign]
    assert torch.equal(encoder(x, lengths)[0], expected)
    assert list(encoder.state_dict()) == names
    assert len(seen) == 1 + 25 + 1
    assert seen[0] == (33, False, [21, 9])
    assert [has_residual for _, has_residual, _ in seen[1:6]] == [False, False, False, False, True]
