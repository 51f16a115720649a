"""Conformer encoders: NeMo's own code with the same weights, where its source is at hand; no padding, exact lengths,
statistics of speech alone, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.speech.network.config import NetworkInvalid, NetworkSettings, read_network
from paceline.recipes.speech.network.conformer.convolution import SpeechBatchNorm
from paceline.recipes.speech.network.conformer.encoder import ConformerEncoder
from paceline.recipes.speech.network.encoder import Decoder, make_encoder, weight_shapes
from paceline.recipes.speech.network.frames import frames_of
from tests.recipes.speech.network.conformer.nemo_source import encoder_class, where

MELS = 20
SMALL = {"d_model": 32, "n_layers": 3, "n_heads": 4, "conv_kernel_size": 7}
STILL = {"dropout": 0.0, "dropout_pre_encoder": 0.0, "dropout_emb": 0.0, "dropout_att": 0.0}
FAST = {"subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 12}
LOCAL = {"self_attention_model": "rel_pos_local_attn", "att_context_size": [6, 6]}
STREAM = {
    "att_context_size": [8, 3],
    "att_context_style": "chunked_limited",
    "conv_context_size": "causal",
    "causal_downsampling": True,
    "conv_norm_type": "layer_norm",
}
WAYS: dict[str, dict[str, Any]] = {
    "striding": {},
    "dw_striding": FAST,
    "local": LOCAL,
    "local, fast": {**FAST, **LOCAL},
    "absolute": {"self_attention_model": "abs_pos", "xscaling": False},
    "stream": {**FAST, **STREAM},
    "stream, striding": STREAM,
    "window": {"att_context_size": [5, 2], "untie_biases": False, "use_bias": False, "conv_context_size": [5, 1]},
}


def network(changes: dict[str, Any], mels: int = MELS) -> NetworkSettings:
    return read_network({"features": {"num_mels": mels}, "conformer": {**SMALL, **changes}})


def encoder(changes: dict[str, Any], dtype: torch.dtype = torch.float64) -> ConformerEncoder:
    """Weights large enough for attention and norms to have something to say."""
    torch.manual_seed(0)
    made = make_encoder(network({**STILL, **changes}))
    assert isinstance(made, ConformerEncoder)
    disturb(made)
    return made.to(dtype)


def disturb(module: nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        if name.endswith(("running_var", "norm.weight")) or ".norm_" in name:
            tensor.uniform_(0.5, 1.5)
        elif tensor.is_floating_point():
            tensor.mul_(1.5).add_(torch.randn_like(tensor), alpha=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_no_output_depends_on_padding_or_neighbours(way: str) -> None:
    """In training neither: the statistics of a batch norm are those of the frames that are there."""
    lengths = [83, 40, 17]
    torch.manual_seed(1)
    x = torch.randn(3, MELS, 83, dtype=torch.float64)
    wide = torch.cat([x, torch.randn(3, MELS, 50, dtype=torch.float64)], 2)
    for training in (False, True):
        made = encoder(WAYS[way]).train(training)
        narrow, out_lengths = made(x, torch.tensor(lengths))
        statistics = {name: tensor.clone() for name, tensor in made.named_buffers()}
        again = encoder(WAYS[way]).train(training)
        padded, padded_lengths = again(wide, torch.tensor(lengths))
        assert out_lengths.tolist() == padded_lengths.tolist() == [made.output_length(length) for length in lengths]
        for row, length in enumerate(out_lengths.tolist()):
            torch.testing.assert_close(padded[row, :, :length], narrow[row, :, :length], rtol=0, atol=1e-10)
        for name, tensor in again.named_buffers():
            torch.testing.assert_close(tensor, statistics[name], rtol=0, atol=1e-10)
        if not training:
            for row, length in enumerate(lengths):
                alone, out = made(x[row : row + 1, :, :length], torch.tensor([length]))
                torch.testing.assert_close(narrow[row, :, : out[0]], alone[0, :, : out[0]], rtol=0, atol=1e-10)


def test_a_stream_sees_nothing_behind_its_chunk() -> None:
    """A chunk of 4 frames, 8 mel frames each, has all it needs when its last frame is there."""
    made = encoder({**FAST, **STREAM}).eval()
    x = torch.randn(1, MELS, 160, dtype=torch.float64)
    changed = x.clone()
    changed[..., 97:] += 1.0
    first, second = (made(each, torch.tensor([160]))[0] for each in (x, changed))
    assert first[..., :12].equal(second[..., :12])
    assert not first[..., 13:].equal(second[..., 13:])


def test_speech_batch_norm_is_that_of_the_frames_in_a_row() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([9, 4, 0, 1])
    x = (3 + 2 * torch.randn(4, 5, 9, dtype=torch.float64)).requires_grad_()
    ours, plain = SpeechBatchNorm(5).double(), nn.BatchNorm1d(5).double()
    for norm in (ours, plain):
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([x[row, :, :length].T for row, length in enumerate(lengths)])
    expected = plain(rows)
    found = ours(x, frames_of(lengths, 9))
    kept = torch.cat([found[row, :, :length].T for row, length in enumerate(lengths)])
    torch.testing.assert_close(kept, expected)
    towards = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((kept * towards).sum(), x, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * towards).sum(), x)
    torch.testing.assert_close(gradient, wanted)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer)


def test_captured_layers_follow_the_last() -> None:
    made = encoder({}).eval()
    x, lengths = torch.randn(2, MELS, 40, dtype=torch.float64), torch.tensor([40, 30])
    both, out_lengths = made(x, lengths, (0,))
    assert len(both) == 4
    assert both[:2].equal(made(x, lengths)[0])
    made.layers = made.layers[:1]
    assert both[2:].equal(made(x, lengths)[0])
    assert out_lengths.tolist() == [10, 8]


def test_layers_are_left_out_as_often_as_set() -> None:
    made = encoder({"n_layers": 2, "stochastic_depth_drop_prob": 0.5, "stochastic_depth_mode": "uniform"}).train()
    assert [made.conformer.drop_probability(layer) for layer in range(2)] == [0.0, 0.5]
    x, y = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    torch.manual_seed(0)
    drawn = torch.stack([made.perhaps_without(1, x, y) for _ in range(200)])
    assert drawn.unique().tolist() == [0.0, 2.0]
    assert 0.8 < drawn.mean().item() < 1.2
    linear = network({"n_layers": 5, "stochastic_depth_drop_prob": 0.2}).conformer
    assert linear is not None
    assert [linear.drop_probability(layer) for layer in range(5)] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_one_of_several_contexts_is_drawn_in_training() -> None:
    contexts = {"att_context_size": [[4, 1], [-1, -1]], "att_context_probs": [0.25, 0.75]}
    made = encoder({**contexts, "att_context_style": "chunked_limited"})
    limited = made.eval().visible(6, torch.device("cpu"))
    assert limited is not None
    assert not limited.all()
    torch.manual_seed(0)
    masks = [made.train().visible(6, torch.device("cpu")) for _ in range(200)]
    is_whole = [bool(mask.all()) for mask in masks if mask is not None]
    assert 0.6 < sum(is_whole) / len(masks) < 0.9
    assert all(mask is not None and (mask.all() or mask.equal(limited)) for mask in masks)


SIZES = {
    "conformer-s": 12_977_741,
    "conformer-m": 30_512_925,
    "conformer-l": 121_450_013,
    "fastconformer-s": 12_605_373,
    "fastconformer-m": 26_136_093,
}


@pytest.mark.parametrize("name", SIZES)
def test_shipped_sizes(name: str) -> None:
    """NeMo's files say 13, 30 and 121 million for the Conformer."""
    shapes = weight_shapes(read_network(name))
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert sum(shape.numel() for weight, shape in shapes.items() if not weight.endswith(buffers)) == SIZES[name]
    settings = read_network(name)
    assert abs(settings.num_weights / SIZES[name] - 1) < 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "n_heads 5 does not divide d_model 32"),
        ({"conv_kernel_size": 8}, "is even"),
        ({"conv_context_size": [3, 4]}, "are not 7"),
        ({"self_attention_model": "rel_pos_local_attn"}, "such as \\[128, 128\\]"),
        ({"self_attention_model": "rel_pos_local_attn", "att_context_size": [9, 5]}, "as many frames before as after"),
        ({"att_context_style": "chunked_limited"}, "needs a limit on the right"),
        ({"att_context_style": "chunked_limited", "att_context_size": [7, 3]}, "no multiple of a chunk, 4"),
        ({"att_context_size": [[4, 1], [4, 3]], "att_context_probs": [1.0]}, "2 numbers that add up to 1"),
        ({"d_modle": 3}, "did you mean d_model?"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NetworkInvalid, match=message) as refused:
        network(changes)
    assert "conformer" in str(refused.value)


@pytest.mark.skipif(where() is None, reason="NeMo's source is not here: set PACELINE_NEMO to a checkout of it")
@pytest.mark.parametrize("size", ["tiny", "s"])
@pytest.mark.parametrize("way", WAYS)
def test_equals_nemo_with_its_weights(way: str, size: str) -> None:
    """Encoder and log-probabilities in float32, on a padded batch: 1e-5."""
    folder = where()
    assert folder is not None
    sizes = (
        {**SMALL, "n_layers": 4}
        if size == "tiny"
        else {"d_model": 176, "n_layers": 6, "n_heads": 4, "conv_kernel_size": 31}
    )
    changes = {**sizes, **WAYS[way]}
    if size == "s" and way == "window":
        changes["conv_context_size"] = [20, 10]
    mels, num_frames = (MELS, 230) if size == "tiny" else (80, 700)
    theirs = nemo_encoder(folder, {"feat_in": mels, **changes})
    ours = make_encoder(network(changes, mels)).eval()
    ours.load_state_dict(theirs.state_dict())
    decoder = Decoder(changes["d_model"], 129)
    x = torch.randn(4, mels, num_frames)
    lengths = torch.tensor([num_frames, num_frames * 2 // 3, 41, 9])
    x = torch.where(torch.arange(num_frames) < lengths[:, None, None], x, 0.0)
    with torch.no_grad():
        expected, expected_lengths = theirs(x, lengths)
        found, found_lengths = ours(x, lengths)
        written, log_probs = _written(decoder, expected), decoder(found)
    assert found_lengths.tolist() == expected_lengths.tolist()
    for row, length in enumerate(found_lengths.tolist()):
        torch.testing.assert_close(found[row, :, :length], expected[row, :, :length], rtol=0, atol=1e-5)
        torch.testing.assert_close(log_probs[row, :length], written[row, :length], rtol=0, atol=1e-5)


def nemo_encoder(folder: Path, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with encoder_class(folder) as kind:
        made = kind(**options).eval()
    disturb(made)
    return made


def _written(decoder: Decoder, encoded: Tensor) -> Tensor:
    return F.log_softmax(F.conv1d(encoded, decoder.conv.weight, decoder.conv.bias).transpose(1, 2), -1)
