"""Archives and files of NeMo's Conformer-CTC and FastConformer-CTC, read and written, with characters and subwords."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from paceline.recipes.speech.exchange.nemo import read_nemo, write_nemo
from paceline.recipes.speech.network.config import NetworkInvalid, NetworkSettings, read_network
from paceline.recipes.speech.network.encoder import Decoder, make_encoder
from paceline.recipes.speech.text.subwords.tokenizer import Tokenizer, learn_bpe, read_tokenizer
from tests.recipes.speech.exchange.test_nemo import archive, saved
from tests.recipes.speech.network.conformer.nemo_source import encoder_class, text_of, where

LABELS = [" ", "a", "b", "'"]
ENCODER: dict[str, Any] = {
    "_target_": "nemo.collections.asr.modules.ConformerEncoder",
    "feat_in": "${model.preprocessor.features}",
    "feat_out": -1,
    "n_layers": 2,
    "d_model": 16,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 6,
    "causal_downsampling": False,
    "reduction": None,
    "reduction_position": None,
    "reduction_factor": 1,
    "self_attention_model": "rel_pos",
    "n_heads": 2,
    "att_context_size": [-1, -1],
    "att_context_style": "regular",
    "pos_emb_max_len": 5000,
    "use_pytorch_sdpa": False,
    "conv_kernel_size": 5,
    "conv_context_size": None,
    "dropout_emb": 0.0,
    "dropout_att": 0.1,
}


def described(**changes: Any) -> dict[str, Any]:
    modules = "nemo.collections.asr.modules."
    return {
        "sample_rate": 16000,
        "labels": LABELS,
        "nemo_version": "1.23.0",
        "train_ds": {"manifest_filepath": "???"},
        "preprocessor": {
            "_target_": modules + "AudioToMelSpectrogramPreprocessor",
            "features": 12,
            "sample_rate": "${model.sample_rate}",
            "window_size": 0.025,
            "pad_to": 0,
        },
        "spec_augment": {"_target_": modules + "SpectrogramAugmentation", "freq_masks": 2, "time_width": 0.05},
        "encoder": {**ENCODER, **changes},
        "decoder": {"_target_": modules + "ConvASRDecoder", "feat_in": None, "num_classes": -1, "vocabulary": LABELS},
        "interctc": {"loss_weights": [0.3], "apply_at_layers": [1]},
        "target": "nemo.collections.asr.models.ctc_models.EncDecCTCModel",
    }


def model(network: NetworkSettings) -> nn.ModuleDict:
    torch.manual_seed(0)
    decoder = Decoder(network.channels[-1], network.num_classes)
    return nn.ModuleDict({"encoder": make_encoder(network), "decoder": decoder}).eval()


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_a_file_of_nemo_is_read_line_by_line() -> None:
    network = read_network(described(att_context_size=[[70, 13], [70, 6]], att_context_style="chunked_limited"))
    conformer = network.conformer
    assert conformer is not None
    assert (conformer.d_model, conformer.subsampling_factor, conformer.conv_kernel_size) == (16, 8, 5)
    assert conformer.att_context_size == ((70, 13), (70, 6))
    assert (conformer.dropout_emb, conformer.dropout_att, conformer.dropout) == (0.0, 0.1, 0.1)
    assert network.features.num_mels == 12
    assert network.features.front_end == "nemo-1.0"
    assert "interctc" in network.unread
    assert network.output_length(800) == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "striding"}, "encoder.reduction.*only none|null is"),
        ({"feat_out": 128}, "encoder.feat_out.*only -1 is"),
        ({"global_tokens": 2}, "encoder.global_tokens.*only 0 is"),
        ({"subsampling": "vggnet"}, "encoder.subsampling.*striding"),
        ({"conv_norm_type": "instance_norm"}, "encoder.conv_norm_type.*batch_norm"),
        ({"n_haeds": 4}, "did you mean n_heads?"),
        ({"_target_": "nemo.collections.asr.modules.SqueezeformerEncoder"}, "only ConformerEncoder is supported"),
    ],
)
def test_what_is_not_known_of_a_file_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NetworkInvalid) as refused:
        read_network(described(**changes))
    import re

    assert re.search(message, f"{refused.value}\n{refused.value.hint}")


def subwords() -> Tokenizer:
    return learn_bpe(["abba baab", "a b ab", "baba aab", "abab"], 9)


@pytest.mark.parametrize("kind", ["characters", "subwords", "blocks"])
def test_archives_are_written_as_they_are_read(kind: str, tmp_path: Path) -> None:
    network = read_network(described() if kind != "blocks" else "small")
    tokenizer = subwords() if kind == "subwords" else None
    if tokenizer is not None:
        network = network.model_copy(update={"labels": tokenizer.pieces})
    weights = dict(model(network).state_dict())
    write_nemo(tmp_path / "a.nemo", network, weights, tokenizer)
    again, found = read_nemo(tmp_path / "a.nemo")
    assert again == network == read_network(tmp_path / "a.nemo")
    assert same(found, weights)
    if tokenizer is not None:
        assert read_tokenizer(tmp_path / "a.nemo") == tokenizer
        with tarfile.open(tmp_path / "a.nemo") as files:
            member = files.extractfile("./model_config.yaml")
            assert member is not None
            config, names = yaml.safe_load(member), files.getnames()
        assert config["target"].endswith("EncDecCTCModelBPE")
        for key in ("model_path", "vocab_path"):  # files of the archive that NeMo looks for
            assert "./" + config["tokenizer"][key].removeprefix("nemo:") in names


@pytest.mark.skipif(where() is None, reason="NeMo's source is not here: set PACELINE_NEMO to a checkout of it")
def test_nemo_makes_the_same_encoder_of_a_written_archive(tmp_path: Path) -> None:
    """And an archive with weights of its own encoder says the same here."""
    folder = where()
    assert folder is not None
    network = read_network(described())
    ours = model(network)
    write_nemo(tmp_path / "a.nemo", network, ours.state_dict())
    with tarfile.open(tmp_path / "a.nemo") as files:
        config = yaml.safe_load(files.extractfile("./model_config.yaml"))  # type: ignore[arg-type]
        weights = torch.load(files.extractfile("./model_weights.ckpt"))  # type: ignore[arg-type]
    options = {name: value for name, value in config["encoder"].items() if name != "_target_"}
    with encoder_class(folder) as kind:
        theirs = kind(**options).eval()
    theirs.load_state_dict(
        {name.removeprefix("encoder."): weight for name, weight in weights.items() if name.startswith("encoder.")}
    )
    x, lengths = torch.randn(2, 12, 90), torch.tensor([90, 50])
    encoder = ours["encoder"]
    with torch.no_grad():
        expected, found = theirs(x, lengths)[0], encoder(x, lengths)[0]
    for row, length in enumerate((12, 7)):
        torch.testing.assert_close(found[row, :, :length], expected[row, :, :length], rtol=0, atol=1e-5)

    state = {f"encoder.{name}": weight for name, weight in theirs.state_dict().items()}
    state |= {name: weight for name, weight in weights.items() if name.startswith("decoder.")}
    _, back = read_nemo(archive(tmp_path / "b.nemo", described(), saved(state)))
    assert same(back, dict(ours.state_dict()))


@pytest.mark.skipif(where() is None, reason="NeMo's source is not here: set PACELINE_NEMO to a checkout of it")
@pytest.mark.parametrize(
    ("path", "shipped", "changes"),
    [
        ("conformer/conformer_ctc_bpe.yaml", "conformer-l", {}),
        ("conformer/conformer_ctc_char.yaml", "conformer-m", {"n_layers": 18, "n_heads": 4, "time_masks": 5}),
        ("fastconformer/fast-conformer_ctc_bpe.yaml", "fastconformer-l", {}),
        ("fastconformer/long_fastconformer/fast-conformer-long_ctc_bpe.yaml", None, {"global_tokens": 0}),
        ("fastconformer/cache_aware_streaming/fastconformer_ctc_bpe_streaming.yaml", None, {}),
    ],
)
def test_its_example_files_are_read(path: str, shipped: str | None, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = where()
    assert folder is not None
    try:
        text = text_of(folder, f"examples/asr/conf/{path}")
    except subprocess.CalledProcessError:
        pytest.skip("an installed NeMo has no examples")
    content = yaml.safe_load(text)
    content["model"]["encoder"] |= {name: value for name, value in changes.items() if name != "time_masks"}
    if "time_masks" in changes:
        content["model"]["spec_augment"]["time_masks"] = changes["time_masks"]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(content))
    network = read_network(tmp_path / "theirs.yaml")
    assert network.conformer is not None
    if shipped is not None:
        assert network == read_network(shipped)
