"""Networks from names, files and NeMo's own forms; and what is said about one that cannot be built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from paceline.config.errors import PacelineError
from paceline.config.settings import Section
from paceline.recipes.asr import nemo_yaml
from paceline.recipes.asr.network import (
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
    assert read_network(value) == read_network("quartznet15x5")
    assert read_network(written(tmp_path, value)) == read_network("quartznet15x5")
    assert read_network(str(written(tmp_path, value))) == read_network("quartznet15x5")


def test_nemo_0_8_and_0_11_names_are_understood() -> None:
    value = nemo_0()
    value["AudioPreprocessing"] = value.pop("AudioToMelSpectrogramPreprocessor") | {"feat_type": "logfbank"}
    del value["JasperEncoder"]["feat_in"]
    assert read_network(value) == read_network("quartznet15x5")
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


def test_the_longest_utterance_is_known() -> None:
    assert nemo_yaml.max_seconds(nemo_0()) == 16.7
    assert nemo_yaml.max_seconds(nemo_1()) == 12.5
    assert nemo_yaml.max_seconds({"model": nemo_1()}) == 12.5
    assert nemo_yaml.max_seconds({"blocks": []}) is None


def test_labels_may_be_one_text() -> None:
    assert read_network({"labels": " abc", "blocks": [BLOCK]}).labels == (" ", "a", "b", "c")


@pytest.mark.parametrize("num_frames", [0, 1, 2, 3, 4, 5, 1000, 1001])
def test_output_length_rounds_up_at_every_stride(num_frames: int) -> None:
    network = read_network({"blocks": [BLOCK | {"stride": 2}, BLOCK, BLOCK | {"stride": 3}]})
    expected = len(range(num_frames)[::2][::3])
    assert network.output_length(num_frames) == expected


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"kernel": 34}, "kernel 34 is even"),
        ({"kernel": [3, 5]}, "must be one number, not 2"),
        ({"kernel": 0}, "greater than 0"),
        ({"stride": 2, "dilation": 2}, "cannot be combined"),
        ({"stride": 2, "residual": True}, "another length than the residual"),
        ({"stride": 2, "repeat": 3}, "8-fold"),
        ({"residual_dense": True}, "residual_dense needs residual"),
        ({"groups": 3}, "groups 3 do not divide its 8 filters"),
        ({"se": True}, "se_reduction_ratio 16 leaves nothing of 8 filters"),
        ({"dropout": 1.0}, "less than 1"),
        ({"repeat": "many"}, "must be a valid integer"),
        ({"filters": None}, "must be a valid integer"),
        ({"dropuot": 0.1}, "did you mean dropout?"),
    ],
)
def test_a_block_that_cannot_work_is_named(block: dict[str, Any], said: str, tmp_path: Path) -> None:
    value = {"blocks": [BLOCK, BLOCK | block]}
    assert said in refusal(value)
    message = refusal(written(tmp_path, value))
    assert said in message
    assert "net.yaml:" in message
    assert "block 2" in message


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """
sample_rate: -1
labels: [a, bc, a]
activation: rleu
features:
  num_mel: 64
  window: han
blocks:
  - {filters: 8, kernel: 4}
  - filters: 8
    kernel: 3
    kernel: 5
    dropout: 2
  - {kernel: 3}
  - 7
"""
    message = refusal(written(tmp_path, text))
    for line, said in {
        2: "sample_rate -1: must be greater than 0",
        3: "labels",
        4: "activation rleu",
        6: "features.num_mel 64: there is no such setting",
        7: "features.window han",
        9: "block 1: kernel 4 is even",
        12: "block 2: kernel: given twice, first in line 11",
        13: "block 2: dropout 2",
        14: "block 3: filters is missing",
        15: "block 4",
    }.items():
        assert f"net.yaml:{line}: {said}" in message, message
    assert "did you mean num_mels?" in message
    assert message.startswith("10 mistakes in the network")


def test_groups_must_divide_what_comes_in() -> None:
    value = {"features": {"num_mels": 10}, "blocks": [{"filters": 8, "kernel": 1, "groups": 4}]}
    assert "block 1: groups 4 do not divide the 10 channels it gets" in refusal(value)


@pytest.mark.parametrize(
    ("labels", "said"),
    [(["a", "the"], "single characters"), (["a", "b", "a"], "'a' more than once"), ([], "empty"), ([1, "a"], "string")],
)
def test_labels_are_distinct_characters(labels: list[Any], said: str) -> None:
    assert said in refusal({"labels": labels, "blocks": [BLOCK]})


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("block", "heads", 8, "block 3: heads 8: is not supported; only -1 is"),
        ("block", "tied", True, "block 3: tied True: is not supported; only false is"),
        ("block", "kernel_size_factor", 0.5, "block 3: kernel_size_factor 0.5: is not supported"),
        ("block", "residual_mode", "stride_add", "block 3: residual_mode stride_add: is not supported; only add is"),
        ("block", "separabel", True, "did you mean separable?"),
        ("encoder", "normalization_mode", "instance", "normalization_mode instance: is not supported; only batch is"),
        ("encoder", "residual_mode", "max", "residual_mode max: is not supported"),
        ("encoder", "frame_splicing", 2, "frame_splicing 2: is not supported; only 1 is"),
        ("encoder", "feat_in", 80, "feat_in 80: but there are 64 features"),
        ("encoder", "cov_mask", True, "did you mean conv_mask?"),
        ("preprocessor", "log_zero_guard_type", "clamp", "log_zero_guard_type clamp: is not supported; only add is"),
        ("preprocessor", "sample_rate", 8000, "sample_rate 8000: but sample_rate is 16000"),
        ("preprocessor", "window", "kaiser", "window kaiser: must be"),
        ("preprocessor", "nfft", 512, "did you mean n_fft?"),
        ("spec_augment", "mask_value", 1.5, "mask_value 1.5: is not supported"),
    ],
)
@pytest.mark.parametrize("generation", [0, 1])
def test_what_nemo_can_and_we_cannot_is_refused_by_name(
    section: str, key: str, value: Any, said: str, generation: int, tmp_path: Path
) -> None:
    document = nemo_0() if generation == 0 else nemo_1()
    names = {
        "encoder": "JasperEncoder",
        "preprocessor": "AudioToMelSpectrogramPreprocessor",
        "spec_augment": "SpectrogramAugmentation",
    }
    encoder = document["JasperEncoder" if generation == 0 else "encoder"]
    place = encoder["jasper"][2] if section == "block" else document[names[section] if generation == 0 else section]
    place[key] = value
    message = refusal(written(tmp_path, document))
    assert said in message
    text = (tmp_path / "net.yaml").read_text().splitlines()
    number = int(message.split("net.yaml:")[1].split(":")[0])
    assert key in text[number - 1]


def test_other_models_of_nemo_are_refused() -> None:
    value = nemo_1()
    value["preprocessor"]["_target_"] = "nemo.collections.asr.modules.AudioToMFCCPreprocessor"
    value["decoder"]["num_classes"] = 29
    message = refusal(value)
    assert (
        "preprocessor: is of class AudioToMFCCPreprocessor; only AudioToMelSpectrogramPreprocessor is supported"
        in message
    )
    assert "decoder.num_classes 29: but there are 28 labels" in message


def test_interpolations_that_lead_nowhere_are_told() -> None:
    value = nemo_1()
    value["encoder"]["jasper"][1]["dropout"] = "${model.nowhere}"
    value["a"], value["b"] = "${b}", "${a}"
    value["encoder"]["activation"] = "${a}"
    message = refusal(value)
    assert "block 2: dropout ${model.nowhere}: points to nothing" in message
    assert "encoder.activation ${a}: points to nothing" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold lines"),
        ("- a\n- b\n", "must hold lines"),
        ("blocks: [\n", "is not YAML"),
        ("blocks: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        ("block: []\n", "block: did you mean blocks?"),
        ("JasperEncoder: {jasper: 3}\n", "must be a list of blocks"),
        ("JasperEncoder: 3\n", "must hold lines"),
        ("blocks: []\n", "at least one block"),
        ("blocks: 3\n", "valid tuple"),
        ("blocks: &a [*a]\n", "nested too deeply"),
        ("[" * 3000, "nested too deeply"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{x}: &{x} [{','.join([f'*{y}'] * 10)}]\n" for y, x in zip("abcdefg", "bcdefgh", strict=True))
            + "blocks: *h\n",
            "holds more than",
        ),
        ("blocks: [\x00]\n", "is not YAML"),
        ("blocks: 2001-99-99\n", "is not YAML"),
    ],
)
def test_a_file_that_is_no_network(text: str, said: str, tmp_path: Path) -> None:
    message = refusal(written(tmp_path, text))
    assert said in message
    assert "net.yaml" in message


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    assert "did you mean quartznet15x5?" in refusal("quartznet15x")
    assert "did you mean jasper15x5sep?" in refusal("jasper15xSEP.yaml")
    assert "type quartznet15x5 alone" in refusal(tmp_path / "configs" / "jasper15x5SEP.yaml")
    assert "shipped: " in refusal("zzz")
    assert "must be a name, a file or a mapping" in refusal(7)
    archive = tmp_path / "model.nemo"
    archive.write_bytes(b"\xff\xfe\x00")
    message = refusal(archive)
    assert "is not a text file" in message
    assert "its network comes with it" in message
    assert "network.yaml" in refusal(tmp_path)


def test_refusals_fit_into_settings_that_hold_a_network() -> None:
    """Pydantic collects a ValueError; the command line wants a PacelineError."""
    from typing import Annotated

    from pydantic import BeforeValidator

    class Holder(Section):
        network: Annotated[NetworkSettings, BeforeValidator(read_network)] = "small"  # type: ignore[assignment]

    assert Holder().network == read_network("small")
    assert Holder.model_validate(Holder().model_dump(mode="json")) == Holder()
    with pytest.raises(ValidationError, match="neither a file nor a shipped network") as caught:
        Holder.model_validate({"network": "quartznet15"})
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, PacelineError)
    assert error.hint == "did you mean quartznet15x5?"
