"""Archives and files of NeMo's Conformer-Transducer and of its hybrids, read and written."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from paceline.recipes.speech.exchange.nemo import read_nemo, write_nemo
from paceline.recipes.speech.network.config import NetworkInvalid, read_network
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.text.subwords.tokenizer import read_tokenizer
from tests.recipes.speech.exchange.test_nemo import archive, saved
from tests.recipes.speech.exchange.test_nemo_conformer import LABELS, described, same, subwords
from tests.recipes.speech.network.conformer.nemo_source import text_of, where


def transducer(*, hybrid: bool = False, dropout: float = 0.2) -> dict[str, Any]:
    """A file as NeMo saves it."""
    modules = "nemo.collections.asr.modules."
    config = described()
    config |= {
        "target": "nemo.collections.asr.models.rnnt_models.EncDecRNNTModel",
        "model_defaults": {"enc_hidden": 16, "pred_hidden": 6, "joint_hidden": 10},
        "decoder": {
            "_target_": modules + "RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "vocab_size": len(LABELS),
            "prednet": {
                "pred_hidden": "${model.model_defaults.pred_hidden}",
                "pred_rnn_layers": 2,
                "t_max": None,
                "dropout": 0.1,
            },
        },
        "joint": {
            "_target_": modules + "RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": True,
            "fused_batch_size": 4,
            "num_classes": len(LABELS),
            "vocabulary": LABELS,
            "jointnet": {"joint_hidden": 10, "activation": "relu", "dropout": dropout, "encoder_hidden": 16},
        },
        "loss": {"loss_name": "default", "warprnnt_numba_kwargs": {"fastemit_lambda": 0.0}},
    }
    if hybrid:
        aux = {"_target_": modules + "ConvASRDecoder", "feat_in": 16, "num_classes": -1, "vocabulary": LABELS}
        config["aux_ctc"] = {"ctc_loss_weight": 0.3, "decoder": aux}
    return config


def theirs(hybrid: bool, dropout: float) -> dict[str, Tensor]:
    """Weights under the names that NeMo's modules give them, beside those of the encoder."""
    sizes = {
        "decoder.prediction.embed.weight": (5, 6),
        **{f"decoder.prediction.dec_rnn.lstm.weight_{kind}_l{n}": (24, 6) for kind in ("ih", "hh") for n in range(2)},
        **{f"decoder.prediction.dec_rnn.lstm.bias_{kind}_l{n}": (24,) for kind in ("ih", "hh") for n in range(2)},
        "joint.enc.weight": (10, 16),
        "joint.enc.bias": (10,),
        "joint.pred.weight": (10, 6),
        "joint.pred.bias": (10,),
        f"joint.joint_net.{2 if dropout else 1}.weight": (5, 10),
        f"joint.joint_net.{2 if dropout else 1}.bias": (5,),
    }
    if hybrid:
        sizes |= {"ctc_decoder.decoder_layers.0.weight": (5, 16, 1), "ctc_decoder.decoder_layers.0.bias": (5,)}
    return {name: torch.randn(*size) for name, size in sizes.items()}


@pytest.mark.parametrize(("hybrid", "dropout"), [(False, 0.2), (True, 0.2), (False, 0.0)])
def test_an_archive_is_read_with_every_weight(hybrid: bool, dropout: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = read_network(transducer(hybrid=hybrid, dropout=dropout))
    assert network.transducer is not None
    assert network.transducer.model_dump() == {
        "pred_hidden": 6,
        "pred_rnn_layers": 2,
        "pred_dropout": 0.1,
        "joint_hidden": 10,
        "joint_activation": "relu",
        "joint_dropout": dropout,
        "ctc": hybrid,
    }
    model = AcousticModel(network)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("encoder.")}
    weights |= (decoder := theirs(hybrid, dropout))
    found, read = read_nemo(archive(tmp_path / "a.nemo", transducer(hybrid=hybrid, dropout=dropout), saved(weights)))
    assert found == network
    model.load_state_dict(read)
    assert torch.equal(read["decoder.joint.out.bias"], decoder[f"joint.joint_net.{2 if dropout else 1}.bias"])
    assert len(read) == len(weights)
    write_nemo(tmp_path / "b.nemo", found, read)
    again, back = read_nemo(tmp_path / "b.nemo")
    assert again == found
    assert same(back, read)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_written_archive_names_nemos_model_and_its_tokenizer(hybrid: bool, tmp_path: Path) -> None:
    tokenizer = subwords()
    network = read_network(transducer(hybrid=hybrid)).model_copy(update={"labels": tokenizer.pieces})
    write_nemo(tmp_path / "a.nemo", network, AcousticModel(network).state_dict(), tokenizer)
    assert read_nemo(tmp_path / "a.nemo")[0] == network
    assert read_tokenizer(tmp_path / "a.nemo") == tokenizer
    with tarfile.open(tmp_path / "a.nemo") as files:
        config = yaml.safe_load(files.extractfile("./model_config.yaml"))  # type: ignore[arg-type]
    kind = "EncDecHybridRNNTCTCBPEModel" if hybrid else "EncDecRNNTBPEModel"
    assert config["target"].endswith(kind)
    assert config["model_defaults"]["enc_hidden"] == config["joint"]["jointnet"]["encoder_hidden"] == 16
    assert config["joint"]["num_classes"] == config["decoder"]["vocab_size"] == len(tokenizer.pieces)
    assert ("aux_ctc" in config) == hybrid


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("joint", {"num_extra_outputs": 5}, "joint.num_extra_outputs.*only 0 is"),
        ("joint", {"_target_": "nemo.collections.asr.modules.SampledRNNTJoint"}, "only RNNTJoint is supported"),
        ("joint", {"num_classes": 7}, "joint.num_classes.*there are 4 labels"),
        ("decoder", {"normalization_mode": "layer"}, "decoder.normalization_mode.*only null is"),
        ("decoder", {"_target_": "nemo.collections.asr.modules.StatelessTransducerDecoder"}, "only RNNTDecoder is"),
        ("decoder", {"prednet": {"pred_hiden": 6}}, "did you mean pred_hidden"),
        ("decoder", {"prednet": None}, "must be there, with `prednet`"),
        ("loss", {"loss_name": "tdt"}, "loss.loss_name.*only the plain transducer loss is"),
    ],
)
def test_what_is_not_known_is_refused_by_name(section: str, changes: dict[str, Any], message: str) -> None:
    config = transducer()
    config[section] = {**config[section], **changes}
    with pytest.raises(NetworkInvalid) as refused:
        read_network(config)
    assert re.search(message, f"{refused.value}\n{refused.value.hint}")


@pytest.mark.skipif(where() is None, reason="NeMo's source is not here: set PACELINE_NEMO to a checkout of it")
@pytest.mark.parametrize(
    ("path", "is_hybrid"),
    [
        ("conformer/conformer_transducer_bpe.yaml", False),
        ("conformer/conformer_transducer_char.yaml", False),
        ("fastconformer/fast-conformer_transducer_bpe.yaml", False),
        ("fastconformer/cache_aware_streaming/fastconformer_transducer_bpe_streaming.yaml", False),
        ("fastconformer/hybrid_transducer_ctc/fastconformer_hybrid_transducer_ctc_bpe.yaml", True),
        ("fastconformer/hybrid_transducer_ctc/fastconformer_hybrid_transducer_ctc_char.yaml", True),
    ],
)
def test_its_example_files_are_read(path: str, is_hybrid: bool, tmp_path: Path) -> None:
    folder = where()
    assert folder is not None
    try:
        text = text_of(folder, f"examples/asr/conf/{path}")
    except subprocess.CalledProcessError:
        pytest.skip("an installed NeMo has no examples")
    (tmp_path / "theirs.yaml").write_text(text)
    network = read_network(tmp_path / "theirs.yaml")
    assert network.transducer is not None
    assert (network.transducer.pred_hidden, network.transducer.ctc) == (640, is_hybrid)
