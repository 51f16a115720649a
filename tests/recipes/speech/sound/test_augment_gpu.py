"""On a GPU, with the kernel: what is computed there is what utterances are one by one, and nothing waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.grain import map_tensors
from paceline.recipes.speech.sound import resample
from paceline.recipes.speech.sound.augment import Augmentation, pending
from paceline.recipes.speech.sound.perturb import PerturbSettings, draw
from tests.recipes.speech.sound.test_augment import CASES, clips, compare, signals
from tests.recipes.speech.sound.test_resample import RATE, kaiser_sinc, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
__all__ = ["clips"]


@pytest.mark.parametrize("name", CASES)
def test_a_batch_on_the_gpu_is_what_its_utterances_are(name: str) -> None:
    changes, most = CASES[name]
    compare(PerturbSettings(**changes), most, "cuda")


def test_noises_on_the_gpu(clips: Path) -> None:
    loud: dict[str, Any] = {"speed_range": (0.9, 1.1), "gain_db": (-6, 0), "white_noise_db": (-60, -50)}
    compare(PerturbSettings(noise_from=clips, noise_snr_db=(0, 20), **loud), 2, "cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_nothing_waits_for_the_gpu() -> None:
    changes, most = CASES["everything"]
    settings = PerturbSettings(**changes)
    compare(settings, most, "cuda")  # what is set up once may wait
    drawn = [draw(len(signal), RATE, settings, np.random.default_rng(key)) for key, signal in enumerate(signals())]
    white = np.zeros((len(drawn), 14000), np.float32)
    data: dict[str, Any] = {"audio": rows_of(*signals()), "lengths": torch.tensor([each.length for each in drawn])}
    data = map_tensors(lambda tensor: tensor.cuda(), {**data, "pending": pending(drawn, 14000, None, white)})
    try:
        torch.cuda.set_sync_debug_mode("error")
        Augmentation.of(settings).finish(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_batch_of_long_rows_is_the_sum_in_float64() -> None:
    """Noise at full scale, at places all over utterances of 16.7 s and at their ends, within a tenth of a step."""
    from paceline.recipes.speech.kernels.interpolate import interpolate

    random = np.random.default_rng(0)
    speeds = np.concatenate([random.uniform(0.9, 1.1, 6), [1.0, 0.9]])
    audio = random.integers(-32768, 32768, (8, 267_200)).astype(np.int16)
    lengths = [int(267_200 / speed + 0.5) for speed in speeds]
    constants = resample.filter_on(torch.device("cuda"))
    rows, each = torch.from_numpy(audio).cuda(), torch.from_numpy(speeds).cuda()
    source = resample.doubled(rows, each, 1.1, resample.num_points(267_200, 1.1), constants)
    out = torch.empty((8, 300_000), dtype=torch.float32, device="cuda")
    shifts, gains = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.ones(8, device="cuda")
    interpolate(source, rows, each, shifts, gains, torch.tensor(lengths, device="cuda"), constants.factors, out)
    found = out.cpu().numpy()
    for row, (speed, length) in enumerate(zip(speeds, lengths, strict=True)):
        places = np.unique([0, 1, 2, 5, length - 3, length - 1, *random.integers(0, length, 100)])
        stretch = max(1.0, speed)
        near = np.floor(places * speed).astype(int)[:, None] + np.arange(-130, 131)
        samples = np.where((near >= 0) & (near < 267_200), audio[row, near.clip(0, 267_199)], 0).astype(np.float64)
        weights = kaiser_sinc((places[:, None] * speed - near) / stretch) / stretch
        exact = audio[row, places] if speed == 1 else (weights * samples).sum(1)
        np.testing.assert_allclose(found[row, places], exact, rtol=0, atol=0.1)
        assert not found[row, length:].any()
