"""Weights from `.nemo` archives: made here with NeMo's names and layout, by modules that know nothing of ours."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.recipes.speech.exchange.export import WeightsDiffer
from paceline.recipes.speech.exchange.nemo import NotANemoArchive, read_nemo
from paceline.recipes.speech.network.config import NetworkInvalid, read_network
from paceline.recipes.speech.network.encoder import Decoder, Encoder
from paceline.recipes.speech.text.pieces import Pieces

LABELS = [" ", "a", "b", "'"]
BLOCKS: list[dict[str, Any]] = [
    {"filters": 8, "repeat": 1, "kernel": [5], "stride": [2], "residual": False, "separable": True},
    {"filters": 8, "repeat": 3, "kernel": [7], "residual": True, "separable": True, "groups": 2},
    {"filters": 12, "repeat": 2, "kernel": [3], "residual": True, "residual_dense": True},
    {"filters": 10, "repeat": 2, "kernel": [3], "residual": True, "residual_dense": True, "separable": True},
    {
        "filters": 8,
        "repeat": 2,
        "kernel": [3],
        "residual": True,
        "separable": True,
        "se": True,
        "se_reduction_ratio": 4,
    },
    {"filters": 8, "repeat": 1, "kernel": [9], "dilation": [2], "residual": False, "groups": 4},
    {"filters": 16, "repeat": 1, "kernel": [1], "residual": False},
]


class Masked(nn.Module):
    """A convolution inside of a module, under the name `conv`."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.conv = conv


class Excite(nn.Module):
    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        down, up = nn.Linear(width, width // ratio, bias=False), nn.Linear(width // ratio, width, bias=False)
        self.fc = nn.Sequential(down, nn.ReLU(), up)


class Shuffle(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups


class TheirBlock(nn.Module):
    """The list of layers of a block as NeMo lays it out, run one utterance at a time, which needs no masks."""

    def __init__(self, width: int, panes: list[int], masked: bool, block: dict[str, Any]) -> None:
        super().__init__()
        filters, groups = block["filters"], block.get("groups", 1)
        kernel, stride, dilation = (block.get(key, [1])[0] for key in ("kernel", "stride", "dilation"))

        def conv(a: int, b: int, k: int = 1, **more: int) -> nn.Module:
            layer = nn.Conv1d(a, b, k, bias=False, **more)  # type: ignore[arg-type]
            return Masked(layer) if masked else layer

        shape = {"stride": stride, "dilation": dilation, "padding": dilation * (kernel // 2)}
        layers: list[nn.Module] = []
        for number in range(block["repeat"]):
            if block.get("separable"):
                layers += [conv(width, width, kernel, groups=width, **shape), conv(width, filters, groups=groups)]
            else:
                layers += [conv(width, filters, kernel, groups=groups, **shape)]
            layers += [nn.BatchNorm1d(filters, eps=1e-3)] + [Shuffle(groups)] * (groups > 1)
            if number < block["repeat"] - 1:
                layers += [nn.ReLU(), nn.Dropout(0.0)]
            width = filters
        layers += [Excite(filters, block["se_reduction_ratio"])] if block.get("se") else []
        self.mconv = nn.ModuleList(layers)
        self.res = nn.ModuleList(
            nn.ModuleList([conv(pane, filters), nn.BatchNorm1d(filters, eps=1e-3)]) for pane in panes
        )

    def run(self, panes: list[Tensor]) -> Tensor:
        x = panes[-1]
        for layer in self.mconv:
            if isinstance(layer, Masked):
                x = layer.conv(x)
            elif isinstance(layer, Shuffle):
                x = torch.cat([x[:, c :: x.shape[1] // layer.groups] for c in range(x.shape[1] // layer.groups)], 1)
            elif isinstance(layer, Excite):
                x = x * torch.sigmoid(layer.fc(x.mean(-1)))[:, :, None]
            else:
                x = layer(x)
        for pane, way in zip(panes, self.res, strict=False):
            for layer in way:  # type: ignore[attr-defined]
                pane = layer.conv(pane) if isinstance(layer, Masked) else layer(pane)
            x = x + pane
        return torch.relu(x)


class TheirModel(nn.Module):
    """Modules nested as in NeMo 1.x, so that `state_dict` has its names."""

    def __init__(self, blocks: list[dict[str, Any]], num_mels: int, num_classes: int, masked: bool = True) -> None:
        super().__init__()
        self.preprocessor = nn.Module()
        self.preprocessor.featurizer = nn.Module()
        self.preprocessor.featurizer.register_buffer("window", torch.hann_window(320))
        self.preprocessor.featurizer.register_buffer("fb", torch.rand(1, num_mels, 257))
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.blocks, made, width, dense = blocks, [], num_mels, list[int]()
        for block in blocks:
            dense = [*dense, width] if block.get("residual_dense") else []
            made.append(TheirBlock(width, (dense or [width]) if block["residual"] else [], masked, block))
            width = block["filters"]
        self.encoder.encoder = nn.Sequential(*made)
        self.decoder.decoder_layers = nn.Sequential(nn.Conv1d(width, num_classes, 1))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
                nn.init.normal_(module.get_buffer("running_mean"), std=0.2)
                nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2.0)

    def run(self, x: Tensor) -> Tensor:
        dense = list[Tensor]()
        for block, layer in zip(self.blocks, self.encoder.encoder, strict=True):  # type: ignore[arg-type]
            dense = [*dense, x] if block.get("residual_dense") else []
            x = layer.run(dense or [x])
        return torch.log_softmax(self.decoder.decoder_layers(x), 1).transpose(1, 2)  # type: ignore[operator]


def config(blocks: list[dict[str, Any]], num_mels: int = 6, *, masked: bool = True) -> dict[str, Any]:
    filled = [{"stride": [1], "dilation": [1], "dropout": 0.0} | block for block in blocks]
    modules = "nemo.collections.asr.modules."
    return {
        "sample_rate": 16000,
        "labels": LABELS,
        "train_ds": {"manifest_filepath": "???", "labels": "${model.labels}"},
        "preprocessor": {
            "_target_": modules + "AudioToMelSpectrogramPreprocessor",
            "features": num_mels,
            "sample_rate": "${model.sample_rate}",
        },
        "encoder": {
            "_target_": modules + "ConvASREncoder",
            "feat_in": "${model.preprocessor.features}",
            "activation": "relu",
            "conv_mask": masked,
            "jasper": filled,
        },
        "decoder": {"_target_": modules + "ConvASRDecoder", "num_classes": len(LABELS), "vocabulary": LABELS},
        "target": "nemo.collections.asr.models.ctc_models.EncDecCTCModel",
        "nemo_version": "1.20.0",
    }


def saved(weights: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


def archive(path: Path, described: Any, weights: bytes, mode: str = "w", prefix: str = "./") -> Path:
    text = described if isinstance(described, bytes) else yaml.safe_dump(described).encode()
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        if prefix:
            folder = tarfile.TarInfo(".")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
        for name, content in (("model_config.yaml", text), ("vocab.txt", b"x"), ("model_weights.ckpt", weights)):
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def their_model(masked: bool = True) -> TheirModel:
    torch.manual_seed(0)
    return TheirModel(BLOCKS, 6, len(LABELS) + 1, masked).eval()


@pytest.mark.parametrize(("mode", "prefix"), [("w", "./"), ("w:gz", "./"), ("w", "")])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
def test_both_models_say_the_same(mode: str, prefix: str, masked: bool, tmp_path: Path) -> None:
    theirs = their_model(masked)
    if masked:
        names = theirs.state_dict()
        for known in ("encoder.0.mconv.0.conv", "encoder.1.res.0.0.conv", "encoder.4.mconv.8.fc.2"):
            assert f"encoder.{known}.weight" in names
        assert "decoder.decoder_layers.0.weight" in names
    path = archive(tmp_path / "q.nemo", config(BLOCKS, masked=masked), saved(theirs.state_dict()), mode, prefix)
    network, weights = read_nemo(path)
    assert network.labels == tuple(LABELS)
    assert network.conv_mask == masked
    encoder, decoder = Encoder(network), Decoder(16, network.num_classes)
    whole = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    whole.load_state_dict(weights)
    whole.eval()
    x = torch.randn(2, 6, 47)
    lengths = [47, 47] if not masked else [47, 20]
    found = decoder(encoder(x, torch.tensor(lengths))[0])
    for row, length in enumerate(lengths):
        expected = theirs.run(x[row : row + 1, :, :length])
        torch.testing.assert_close(found[row, : expected.shape[1]], expected[0], rtol=0, atol=1e-6)


def test_quartznet_15x5_is_read_whole(tmp_path: Path) -> None:
    """All names of the real network, on few mels and channels."""
    blocks = [block.model_dump() for block in read_network("quartznet15x5").blocks]
    for block in blocks:
        block |= {"filters": block["filters"] // 32, **{key: [block[key]] for key in ("kernel", "stride", "dilation")}}
    torch.manual_seed(0)
    theirs = TheirModel(blocks, 6, 5).eval()
    network, weights = read_nemo(archive(tmp_path / "q.nemo", config(blocks), saved(theirs.state_dict())))
    assert len(network.blocks) == 18
    assert sum(w.numel() for w in weights.values()) == sum(
        w.numel() for name, w in theirs.state_dict().items() if not name.startswith("preprocessor")
    )


def test_half_precision_and_missing_counters_are_no_obstacle(tmp_path: Path) -> None:
    state = {
        name: value.half() if value.is_floating_point() else value for name, value in their_model().state_dict().items()
    }
    state = {name: value for name, value in state.items() if "num_batches_tracked" not in name}
    _, weights = read_nemo(archive(tmp_path / "q.nemo", config(BLOCKS), saved(state)))
    assert {w.dtype for w in weights.values()} == {torch.float32, torch.int64}


def test_every_name_must_be_used_or_known(tmp_path: Path) -> None:
    state = their_model().state_dict()
    state["encoder.encoder.1.res.0.0.conv.wieght"] = state.pop("encoder.encoder.1.res.0.0.conv.weight")
    state["encoder.adapter.0.weight"] = torch.zeros(3)
    with pytest.raises(WeightsDiffer) as caught:
        read_nemo(archive(tmp_path / "q.nemo", config(BLOCKS), saved(state)))
    assert set(caught.value.mistakes) == {
        "encoder.encoder.1.res.0.0.conv.weight is missing",
        "encoder.encoder.1.res.0.0.conv.wieght is not known",
        "encoder.adapter.0.weight is not known",
    }
    assert "q.nemo" in str(caught.value)


def test_shapes_must_be_those_of_the_network(tmp_path: Path) -> None:
    state = their_model().state_dict()
    state["decoder.decoder_layers.0.bias"] = torch.zeros(29)
    with pytest.raises(WeightsDiffer, match="decoder.conv.bias is 29 instead of 5"):
        read_nemo(archive(tmp_path / "q.nemo", config(BLOCKS), saved(state)))


def test_only_plain_numbers_are_weights(tmp_path: Path) -> None:
    state = their_model().state_dict()
    name = "decoder.decoder_layers.0.bias"
    for tensor, said in (
        (torch.zeros(1, dtype=torch.int8).expand(10**12), "is 1000000000000 instead of 5"),  # of which no copy is made
        (state[name].to_sparse(), "is no plain tensor, but torch.sparse_coo"),
        (state[name].to("meta"), "is no plain tensor, but on no device"),
        (state[name].to(torch.complex64), "is no plain tensor, but torch.complex64"),
        (state[name] * float("nan"), "holds values that are no numbers"),
    ):
        with pytest.raises(PacelineError, match=said):
            read_nemo(archive(tmp_path / "q.nemo", config(BLOCKS), saved({**state, name: tensor})))
    packed, plain = io.BytesIO(), zipfile.ZipFile(io.BytesIO(saved(state)))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bomb:
        for each in plain.namelist():
            bomb.writestr(each, bytes(2**24) if each.endswith("data/0") else plain.read(each))
    with pytest.raises(NotANemoArchive, match="is compressed, and has 1[67],[0-9,]* bytes when it is unpacked"):
        read_nemo(archive(tmp_path / "q.nemo", config(BLOCKS), packed.getvalue()))


class Bomb:
    """Runs a command where pickles are obeyed."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("save", [saved, pickle.dumps], ids=["torch.save", "pickle"])
def test_nothing_in_the_weights_is_executed(save: Callable[[Any], bytes], tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    weights = save({"encoder.weight": Bomb(mark)})
    with pytest.raises(NotANemoArchive, match="cannot be read as tensors only"):
        read_nemo(archive(tmp_path / "q.nemo", config(BLOCKS), weights))
    assert not mark.exists()


def test_links_and_repetitions_are_refused_and_nothing_is_unpacked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE):
        path = tmp_path / "link.nemo"
        with tarfile.open(path, "w") as tar:
            info = tarfile.TarInfo("model_config.yaml")
            info.type, info.linkname = kind, str(secret)
            tar.addfile(info)
        with pytest.raises(NotANemoArchive, match="a link or folder"):
            read_nemo(path)
    before = sorted(tmp_path.iterdir())
    path = tmp_path / "twice.nemo"
    with tarfile.open(path, "w") as tar:
        for name in ("../outside", "/tmp/absolute-paceline", "model_config.yaml", "./model_config.yaml"):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"{}"))
    with pytest.raises(NotANemoArchive, match="model_config.yaml is in it twice"):
        read_nemo(path)
    assert sorted(tmp_path.iterdir()) == sorted([*before, path])
    assert not (tmp_path.parent / "outside").exists()


def test_a_configuration_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.nemo"
    info = tarfile.TarInfo("model_config.yaml")
    info.size = 2**40
    path.write_bytes(info.tobuf() + b"a" * 1024)
    with pytest.raises(NotANemoArchive, match="at most 1,000,000 are read"):
        read_nemo(path)


def test_files_that_are_no_archive(tmp_path: Path) -> None:
    good = archive(tmp_path / "q.nemo", config(BLOCKS), saved(their_model().state_dict()), "w:gz").read_bytes()
    plain = archive(tmp_path / "p.nemo", config(BLOCKS), saved(their_model().state_dict())).read_bytes()
    path = tmp_path / "bad.nemo"
    for content in (b"", b"hello", good[:200], good[: len(good) // 2], plain[:3000], good[:1000] + good[1100:]):
        path.write_bytes(content)
        with pytest.raises(NotANemoArchive) as caught:
            read_nemo(path)
        assert str(path) in str(caught.value)
    with pytest.raises(NotANemoArchive, match="no such file"):
        read_nemo(tmp_path / "none.nemo")
    with pytest.raises(NotANemoArchive):
        read_nemo(tmp_path)
    for described, weights, said in (
        (b"encoder: [", saved({}), "is not YAML"),
        (b"\xff\xfe", saved({}), "is not text"),
        (config(BLOCKS), saved([1]), "does not hold tensors by name"),
        (config(BLOCKS), saved({"a": 1}), "does not hold tensors by name"),
        (config(BLOCKS), b"zip", "cannot be read as tensors only"),
    ):
        with pytest.raises(PacelineError, match=said):
            read_nemo(archive(path, described, weights))
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("other"))
    with pytest.raises(NotANemoArchive, match="there is no model_config.yaml in it"):
        read_nemo(path)


def test_subwords_are_labels_too(tmp_path: Path) -> None:
    """Of SentencePiece as they are; of BERT in the same form."""
    for named, labels in (("\u2581a", "b"), ("\u2581a", "b")), (("a", "##b"), ("\u2581a", "b")):
        described = config(BLOCKS)
        more = [f"{named[1]}{letter}" for letter in "cde"[: len(LABELS) - 3]]
        described["decoder"]["vocabulary"] = ["<unk>", *named, *more]
        described["tokenizer"] = {"dir": "???", "type": "bpe", "model_path": "nemo:0a1b_tokenizer.model"}
        network, _ = read_nemo(archive(tmp_path / "q.nemo", described, saved(their_model().state_dict())))
        assert network.labels[:3] == ("<unk>", *labels)
        assert Pieces(network.labels).decode([1, 2, 0]) == "ab \u2047"
        assert "tokenizer (dir, model_path, type)" in network.unread


def test_models_that_are_not_ours_are_refused_with_the_reason(tmp_path: Path) -> None:
    described = config(BLOCKS)
    described["encoder"]["jasper"][1]["residual_mode"] = "stride_add"
    described["decoder"]["vocabulary"] = ["the", "a", " ", "b"]
    with pytest.raises(NetworkInvalid) as caught:
        read_nemo(archive(tmp_path / "q.nemo", described, saved(their_model().state_dict())))
    assert "block 2: residual_mode stride_add: is not supported" in str(caught.value)
    assert "must be single characters, or subwords" in str(caught.value)
    assert "q.nemo/model_config.yaml:" in str(caught.value)
