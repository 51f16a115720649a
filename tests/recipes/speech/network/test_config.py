"""Networks from names, files and NeMo's own forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.recipes.speech.network.config import (
    ENGLISH,
    BlockSettings,
    NetworkInvalid,
    NetworkSettings,
    read_network,
    shipped_names,
)

BLOCK = {"filters": 8, "kernel": 3}
# filters, repeat, kernel, stride, dilation, residual, separable: the table of QuartzNet 15x5
TABLE = [
    (256, 1, 33, 2, 1, False, True),
    *[(256, 5, 33, 1, 1, True, True)] * 3,
    *[(256, 5, 39, 1, 1, True, True)] * 3,
    *[(512, 5, 51, 1, 1, True, True)] * 3,
    *[(512, 5, 63, 1, 1, True, True)] * 3,
    *[(512, 5, 75, 1, 1, True, True)] * 3,
    (512, 1, 87, 1, 2, False, True),
    (1024, 1, 1, 1, 1, False, False),
]


def nemo_blocks() -> list[dict[str, Any]]:
    names = ("filters", "repeat", "kernel", "stride", "dilation", "residual", "separable")
    listed = ("kernel", "stride", "dilation")
    return [
        {name: [value] if name in listed else value for name, value in zip(names, row, strict=True)} | {"dropout": 0.0}
        for row in TABLE
    ]


def nemo_0() -> dict[str, Any]:
    return {
        "model": "Jasper",
        "sample_rate": 16000,
        "AudioToTextDataLayer": {"max_duration": 16.7, "trim_silence": True, "eval": {"max_duration": None}},
        "AudioToMelSpectrogramPreprocessor": {
            "window_size": 0.02,
            "window_stride": 0.01,
            "window": "hann",
            "normalize": "per_feature",
            "n_fft": 512,
            "features": 64,
            "dither": 0.00001,
            "pad_to": 16,
            "stft_conv": True,
        },
        "SpectrogramAugmentation": {"rect_masks": 5, "rect_time": 120, "rect_freq": 50},
        "JasperEncoder": {"feat_in": 64, "activation": "relu", "conv_mask": True, "jasper": nemo_blocks()},
        "labels": list(ENGLISH),
    }


def nemo_1(*, params: bool = False) -> dict[str, Any]:
    old = nemo_0()
    parts = {
        "preprocessor": ("AudioToMelSpectrogramPreprocessor", old["AudioToMelSpectrogramPreprocessor"]),
        "spec_augment": ("SpectrogramAugmentation", old["SpectrogramAugmentation"]),
        "encoder": ("ConvASREncoder", old["JasperEncoder"] | {"feat_in": "${model.preprocessor.features}"}),
        "decoder": ("ConvASRDecoder", {"feat_in": 1024, "num_classes": 28, "vocabulary": "${labels}"}),
    }
    if params:
        parts["encoder"][1]["feat_in"] = 64
    return {
        "sample_rate": 16000,
        "labels": list(ENGLISH),
        "train_ds": {"manifest_filepath": "???", "max_duration": 12.5, "labels": "${labels}"},
        "optim": {"name": "novograd", "unknown": "${oc.env:HOME}"},
        **{
            role: {"cls": f"nemo.asr.{kind}", "params": values} if params else {"_target_": f"nemo.asr.{kind}"} | values
            for role, (kind, values) in parts.items()
        },
    }


def refusal(what: Any) -> str:
    with pytest.raises(NetworkInvalid) as caught:
        read_network(what)
    return f"{caught.value}\n{caught.value.hint}"


def plain(network: NetworkSettings) -> NetworkSettings:
    """Without what the data section of 0.x asks for."""
    return network.model_copy(update={"trim_silence": "no"})


def written(folder: Path, value: Any, name: str = "net.yaml") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return path


# -- what is read --------------------------------------------------------------------------------------------------


def test_shipped_names_are_read_with_and_without_their_suffix() -> None:
    assert {"quartznet15x5", "quartznet5x5", "quartznet12x1", "jasper10x5", "jasper10x5dr", "small"} <= set(
        shipped_names()
    )
    network = read_network("quartznet15x5")
    assert read_network("quartznet15x5.yaml") == network
    assert read_network("jasper15x5SEP") == read_network("jasper15x5SEP.yaml") == network
    assert read_network(network) is network
    assert network.labels == ENGLISH
    assert network.num_classes == 29
    assert [
        (b.filters, b.repeat, b.kernel, b.stride, b.dilation, b.residual, b.separable) for b in network.blocks
    ] == TABLE


def test_a_file_beats_a_shipped_name_with_suffix_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"blocks": [BLOCK]}, "small.yaml")
    (tmp_path / "quartznet5x5").mkdir()
    assert len(read_network("small.yaml").blocks) == 1
    assert len(read_network("small").blocks) > 1
    assert len(read_network("quartznet5x5").blocks) == 8


@pytest.mark.parametrize("name", shipped_names())
def test_what_a_run_stores_is_read_back(name: str) -> None:
    network = read_network(name)
    assert read_network(json.loads(json.dumps(network.model_dump(mode="json")))) == network


@pytest.mark.parametrize(
    "value",
    [nemo_0(), nemo_1(), nemo_1(params=True), {"name": "x", "model": nemo_1()}],
    ids=["0.x", "1.x", "1.x with params", "1.x training file"],
)
def test_nemo_forms_give_the_shipped_network(value: dict[str, Any], tmp_path: Path) -> None:
    assert plain(read_network(value)) == read_network("quartznet15x5")
    assert plain(read_network(written(tmp_path, value))) == read_network("quartznet15x5")
    assert plain(read_network(str(written(tmp_path, value)))) == read_network("quartznet15x5")


def test_nemo_0_8_and_0_11_names_are_understood() -> None:
    value = nemo_0()
    value["AudioPreprocessing"] = value.pop("AudioToMelSpectrogramPreprocessor") | {"feat_type": "logfbank"}
    del value["JasperEncoder"]["feat_in"]
    assert plain(read_network(value)) == read_network("quartznet15x5")
    new = nemo_1(params=True)
    inner = {
        f"{role}_params": {"header": {"full_spec": new[role]["cls"]}, "init_params": new[role]["params"]}
        for role in ("encoder", "preprocessor", "spec_augment", "decoder")
    }
    inner["decoder_params"]["init_params"]["vocabulary"] = list(ENGLISH)
    assert read_network({"header": {}, "init_params": inner}) == read_network("quartznet15x5")


def test_anchors_merges_and_text_numbers_are_values_like_any_other(tmp_path: Path) -> None:
    text = """
sample_rate: &rate 8000
base: &base {repeat: 2, stride: [1], dilation: [1], dropout: 0.1, residual: true, separable: true}
AudioPreprocessing: {features: &mels 40, sample_rate: *rate, preemph: null, normalize: null, dither: 1e-5,
  log_zero_guard_value: eps, window: null}
JasperEncoder:
  feat_in: *mels
  activation: relu
  jasper:
    - {<<: *base, filters: 8, kernel: [11]}
    - {<<: *base, filters: 16, kernel: [13], heads: -1, kernel_size_factor: 1.0, residual_mode: add}
labels: [a, b]
"""
    network = read_network(written(tmp_path, text))
    assert network.sample_rate == 8000
    assert network.labels == ("a", "b")
    assert network.features.num_mels == 40
    assert network.features.preemphasis == 0.0
    assert network.features.normalize == "none"
    assert network.features.window == "ones"
    assert network.features.dither == 1e-5
    assert network.features.log_guard == 2.0**-23
    assert network.blocks == (
        BlockSettings(filters=8, kernel=11, repeat=2, dropout=0.1, residual=True, separable=True),
        BlockSettings(filters=16, kernel=13, repeat=2, dropout=0.1, residual=True, separable=True),
    )


def test_the_default_of_squeeze_and_excite_differs_between_nemo_0_and_1() -> None:
    old, new = nemo_0(), nemo_1()
    for blocks in (old["JasperEncoder"]["jasper"], new["encoder"]["jasper"]):
        blocks[3]["se"] = True
    assert read_network(old).blocks[3].se_reduction_ratio == 16
    assert read_network(new).blocks[3].se_reduction_ratio == 8


def test_silence_is_trimmed_as_nemo_s_data_sections_ask() -> None:
    old, new = nemo_0(), nemo_1()
    del old["AudioToTextDataLayer"]
    assert read_network(old).trim_silence == read_network(new).trim_silence == "no"
    assert "trim_silence" not in read_network(old).model_dump(), "runs of earlier versions go on"
    old["AudioToTextDataLayer"] = {"trim_silence": True, "max_duration": 16.7, "train": {"shuffle": True}}
    assert read_network(old).trim_silence == "all"
    assert read_network(old).model_dump()["trim_silence"] == "all"
    old["AudioToTextDataLayer"]["eval"] = {"trim_silence": False}
    assert read_network(old).trim_silence == "train"
    place = new.get("model", new)
    place["train_ds"] = {"trim_silence": True, "batch_size": 32}
    place["optim"] = {"name": "novograd"}
    network = read_network(new)
    assert network.trims(is_training=True)
    assert not network.trims(is_training=False)
    for words in ("train_ds (batch_size)", "optim (name)", "not read here"):
        assert words in network.unread
    place["validation_ds"] = {"trim_silence": True}
    assert read_network(new).trims(is_training=False)
    place["train_ds"] = {"trim_silence": "perhaps"}
    assert "must be true or false" in refusal(new)
    place["train_ds"] = {}
    assert "unless training data is trimmed" in refusal(new)


def test_labels_may_be_one_text() -> None:
    assert read_network({"labels": " abc", "blocks": [BLOCK]}).labels == (" ", "a", "b", "c")


@pytest.mark.parametrize("num_frames", [0, 1, 2, 3, 4, 5, 1000, 1001])
def test_output_length_rounds_up_at_every_stride(num_frames: int) -> None:
    network = read_network({"blocks": [BLOCK | {"stride": 2}, BLOCK, BLOCK | {"stride": 3}]})
    expected = len(range(num_frames)[::2][::3])
    assert network.output_length(num_frames) == expected


# -- front ends by version -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "front_end"),
    [
        (None, "nemo-0.11"),
        ("0.11.0", "nemo-0.11"),
        ("1.0.0b3", "nemo-0.11"),
        ("1.0.0rc1", "nemo-0.11"),
        ("1.0.2", "nemo-1.0"),
        ("1.20.0", "nemo-1.0"),
        ("1.23.0rc0", "nemo-1.0"),
        ("2.4.0", "nemo-1.0"),
        ("2.5.0rc0", "nemo-2.5"),
        ("2.10.0", "nemo-2.5"),
        ("3.0.0", "nemo-2.5"),
    ],
)
def test_a_files_version_is_its_front_end(version: str | None, front_end: str) -> None:
    written = nemo_1() | ({"nemo_version": version} if version else {})
    assert read_network(written).features.front_end == front_end


def test_what_is_no_version_is_refused(tmp_path: Path) -> None:
    assert "nemo_version newest: is no version of NeMo" in refusal(nemo_1() | {"nemo_version": "newest"})


def test_windows_in_samples_and_other_words_of_archives() -> None:
    document = nemo_1()
    front = document["preprocessor"]
    for name in ("window_size", "window_stride"):
        front.pop(name, None)
    front |= {"n_window_size": 400, "n_window_stride": 200, "log_zero_guard_type": "clamp", "normalize": "NA"}
    features = read_network(document).features
    assert (features.window_s, features.stride_s) == (0.025, 0.0125)
    assert (features.log_guard_type, features.normalize) == ("clamp", "none")
