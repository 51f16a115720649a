"""The front end beside NeMo's own code, read out of a clone of its repository: `NEMO_REPOSITORY=folder pytest ...`.

Nothing of NeMo is installed or copied: its one file of features is executed with stubs for what it imports. It is
executed in float64, too, since the float32 FFT that it asks for moves features of real speech by 1e-4 by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.recipes.speech.sound.features import FeatureSettings, FrontEnd, LogMel
from tests.recipes.speech.sound.test_features import DATA, speech, triangles

FILE = "nemo/collections/asr/parts/preprocessing/features.py"
VERSIONS: list[tuple[str, FrontEnd]] = [
    ("v1.20.0", "nemo-1.0"),
    ("v2.3.0", "nemo-1.0"),
    ("v2.5.0rc0", "nemo-2.5"),
    ("HEAD", "nemo-2.5"),
]
SETTINGS: dict[str, tuple[dict[str, Any], FeatureSettings]] = {
    "QuartzNet": ({"n_fft": 512}, FeatureSettings(n_fft=512)),
    "Conformer": (
        {"n_window_size": 400, "nfilt": 80, "n_fft": 512, "pad_to": 0},
        FeatureSettings(window_s=0.025, num_mels=80, n_fft=512, pad_to=0),
    ),
    "other": (
        {"window": "hamming", "preemph": None, "mag_power": 1.0, "normalize": "all_features", "lowfreq": 20,
         "highfreq": 7600, "log_zero_guard_type": "clamp", "log_zero_guard_value": 1e-5, "pad_to": 8},
        FeatureSettings(window="hamming", preemphasis=0.0, mag_power=1.0, normalize="all_features", low_hz=20,
                        high_hz=7600, log_guard_type="clamp", log_guard=1e-5, pad_to=8),
    ),
}  # fmt: skip


class InDouble(ModuleType):
    """torch, where `float` means float64, and windows are in it."""

    def __getattr__(self, name: str) -> Any:
        if name == "hann_window":
            return partial(torch.hann_window, dtype=torch.float64)
        if name == "hamming_window":
            return partial(torch.hamming_window, dtype=torch.float64)
        return torch.float64 if name == "float" else getattr(torch, name)


def their_features(version: str, monkeypatch: pytest.MonkeyPatch, *, in_double: bool) -> Any:
    """Execute the file of a version; only what it imports is ours."""
    folder = os.environ.get("NEMO_REPOSITORY")
    if not folder:
        pytest.skip("NEMO_REPOSITORY names no clone of github.com/NVIDIA/NeMo")
    shown = subprocess.run(["git", "-C", folder, "show", f"{version}:{FILE}"], capture_output=True, check=False)
    if shown.returncode:
        pytest.skip(f"there is no {version} in {folder}")

    def mel(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str) -> Any:
        assert norm == "slaney"
        return triangles(sr, n_fft, n_mels, fmin, fmax).astype(np.float64 if in_double else np.float32)

    names = ["nemo", "nemo.collections", "nemo.collections.asr", "nemo.collections.asr.parts", "nemo.utils"]
    names += [f"nemo.collections.asr.parts.{inner}" for inner in ("preprocessing", "utils", "mixins")]
    named: dict[str, dict[str, Any]] = {name: {} for name in names}
    named["nemo.utils"]["logging"] = SimpleNamespace(info=print, debug=lambda *_: None, warning=print)
    named["nemo.collections.asr.parts.preprocessing.perturb"] = {"AudioAugmentor": object}
    named["nemo.collections.asr.parts.preprocessing.segment"] = {"AudioSegment": object}
    named["nemo.collections.asr.parts.utils.audio_utils"] = {}
    named["librosa"] = {"filters": SimpleNamespace(mel=mel)}
    for name, values in named.items():
        stub = ModuleType(name)
        stub.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, stub)
    module = ModuleType("their_features")
    exec(compile(shown.stdout, f"{version}:{FILE}", "exec"), module.__dict__)
    if in_double:
        module.__dict__["torch"] = InDouble("torch")
    return module


@pytest.mark.filterwarnings("ignore::FutureWarning")  # what 1.20 calls is deprecated
@pytest.mark.parametrize(("version", "front_end"), VERSIONS, ids=[version for version, _ in VERSIONS])
@pytest.mark.parametrize("name", SETTINGS)
def test_front_end_is_that_version_of_nemo(
    name: str, version: str, front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, settings = SETTINGS[name]
    ours = LogMel(settings.model_copy(update={"front_end": front_end}), 16000).eval()
    recordings = speech(DATA / "librispeech/test.json", 20)
    assert len(recordings) == 20
    for in_double, limit in ((True, 1e-5), (False, 2e-4)):
        module = their_features(version, monkeypatch, in_double=in_double)
        theirs = module.FilterbankFeatures(dither=0.0, **arguments).eval()
        largest = num_above = num_values = 0.0
        for audio in recordings:
            lengths = torch.tensor([len(audio)])
            signal = torch.from_numpy(audio)[None].to(torch.float64 if in_double else torch.float32) / 32768.0
            wanted, frames = theirs(signal, lengths)
            found, num_frames = ours(torch.from_numpy(audio)[None], lengths)
            assert num_frames.tolist() == frames.tolist() == [ours.num_frames(len(audio))]
            count = int(frames[0])
            difference = (found[0, :, :count] - wanted[0, :, :count]).abs()
            largest = max(largest, float(difference.max()))
            num_above += float((difference > 1e-4).sum())
            num_values += difference.numel()
            assert not wanted[0, :, count:].any()
        bits = 64 if in_double else 32
        print(f"{name} {version} float{bits}: {largest:.1e}, {num_above:.0f} of {num_values:.0f} above 1e-4")
        assert largest <= limit
