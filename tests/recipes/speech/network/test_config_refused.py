"""What is said about a network that cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config.settings import Section
from paceline.core.errors import PacelineError
from paceline.recipes.speech.network.config import (
    NetworkSettings,
    read_network,
)
from tests.recipes.speech.network.test_config import BLOCK, nemo_0, nemo_1, refusal, written


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
        ("preprocessor", "use_torchaudio", True, "use_torchaudio True: is not supported; only false is"),
        ("preprocessor", "log_zero_guard_type", "max", "log_zero_guard_type max: must be"),
        ("preprocessor", "n_window_size", 320, "n_window_size 320: but `window_size` is set, too"),
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


def test_interpolations_of_interpolations_are_bounded() -> None:
    """Each of six lists holds the one before it ten times: a million entries."""
    value = nemo_1()
    value["l0"] = ["x"] * 10
    value |= {f"l{number}": [f"${{l{number - 1}}}"] * 10 for number in range(1, 7)}
    value["encoder"]["activation"] = "${l6}"
    assert "more than 10,000 interpolations" in refusal(value)


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
        ("blocks: &a [*a]\n", "`*a` stands for what it is part of"),
        ("[" * 3000, "nested more than 50 deep"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{x}: &{x} [{','.join([f'*{y}'] * 10)}]\n" for y, x in zip("abcdefg", "bcdefgh", strict=True))
            + "blocks: *h\n",
            "more than 50,000 values",
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
    assert "it is no tar file, or a damaged one" in message
    assert "is a tar file with model_config.yaml" in message
    assert "there is no such file" in refusal(tmp_path / "gone.nemo")
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
