"""Whole batches on the device against one utterance after the other: the same draws, the same samples."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.data.grain import map_tensors
from paceline.recipes.speech.sound import augment
from paceline.recipes.speech.sound.augment import Augmentation, pending
from paceline.recipes.speech.sound.perturb import Draw, PerturbSettings, draw, perturb
from paceline.recipes.speech.sound.placement import NotOnDevice, Placement, describe, place
from tests.recipes.speech.sound.test_resample import RATE, rows_of, speech_like

soundfile = pytest.importorskip("soundfile")
LENGTHS = (9000, 12000, 300, 7500, 11999, 8000, 1, 10000)
EXACT: dict[str, Any] = {
    "shift_ms": (-5, 5),
    "shift_prob": 0.7,
    "gain_db": (-10, 10),
    "gain_prob": 0.6,
    "white_noise_db": (-60, -46),
    "white_noise_prob": 0.5,
}


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    random = np.random.default_rng(5)
    for name, samples in (("long", 40000), ("short", 3000)):
        soundfile.write(tmp_path / f"{name}.flac", (2000 * random.standard_normal(samples)).astype(np.int16), RATE)
    return tmp_path


def one_by_one(signals: list[NDArray[np.int16]], settings: PerturbSettings) -> list[NDArray[np.int16]]:
    return [perturb(signal, RATE, settings, np.random.default_rng(key)) for key, signal in enumerate(signals)]


def at_once(
    signals: list[NDArray[np.int16]], settings: PerturbSettings, device: str = "cpu"
) -> tuple[NDArray[np.int16], list[Draw]]:
    drawn = [draw(len(signal), RATE, settings, np.random.default_rng(key)) for key, signal in enumerate(signals)]
    width = max(each.length for each in drawn) + 99
    change = Augmentation.of(settings)
    # Filled with what a slot may hold from before.
    noise = np.full((len(signals), width), 77, np.int16) if change.adds_noise else None
    white = np.full((len(signals), width), 77, np.float32) if change.adds_white_noise else None
    waiting = pending(drawn, width, noise, white)
    data = {
        "audio": rows_of(*signals),
        "lengths": torch.tensor([each.length for each in drawn]),
        "pending": waiting,
        "text": "stays",
    }
    data = map_tensors(lambda tensor: tensor.to(device), data)
    finished = change.finish(data)
    assert set(finished) == {"audio", "lengths", "text"}
    assert change.finish(finished) is finished
    return finished["audio"].cpu().numpy(), drawn


def signals() -> list[NDArray[np.int16]]:
    return [speech_like(length, seed) for seed, length in enumerate(LENGTHS)]


def compare(settings: PerturbSettings, most: int, device: str = "cpu") -> None:
    found, drawn = at_once(signals(), settings, device)
    for row, expected in enumerate(one_by_one(signals(), settings)):
        length = len(expected)
        assert drawn[row].length == length
        # soxr's first three samples are off where a sound begins at once
        first = 0 if drawn[row].speed == 1 else 3 + max(0, drawn[row].shift)
        difference = np.abs(found[row, first:length].astype(int) - expected[first:])
        assert difference.max(initial=0) <= most
        assert not found[row, length:].any()


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "speed": ({"speed_range": (0.9, 1.1)}, 1),
    "speed and gain": ({"speed_range": (0.9, 1.1), "gain_db": (-6, 6)}, 2),
    "factors, some of them 1, of some": ({"speed_factors": (0.9, 1.0, 1.1), "speed_prob": 0.6}, 1),
    "gain": ({"gain_db": (-6, 40)}, 0),
    "shift": ({"shift_ms": (-40, 40)}, 0),
    "all that needs no speed": (EXACT, 0),
    "everything": ({**EXACT, "speed_range": (0.9, 1.1), "gain_db": (-6, 0)}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_what_its_utterances_are(name: str) -> None:
    changes, most = CASES[name]
    compare(PerturbSettings(**changes), most)


@pytest.mark.parametrize("snr", [(0, 20), (40, 40)])
def test_noises_are_added_at_their_ratio(clips: Path, snr: tuple[float, float]) -> None:
    compare(PerturbSettings(noise_from=clips, noise_snr_db=snr, noise_prob=0.7), most=1)
    loud: dict[str, Any] = {"speed_range": (0.9, 1.1), "gain_db": (-6, 0), "white_noise_db": (-60, -50)}
    compare(PerturbSettings(noise_from=clips, noise_snr_db=snr, **loud), most=2)


def test_silence_stays_silent_and_silent_noise_adds_nothing(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silent.flac", np.zeros(5000, np.int16), RATE)
    settings = PerturbSettings(noise_from=tmp_path, gain_db=(-6, 6))
    found, _ = at_once([np.zeros(900, np.int16), speech_like(900, 1)], settings)
    assert not found[0].any()
    assert np.array_equal(found[1, :900], one_by_one([speech_like(900, 1)] * 2, settings)[1])


def test_some_rows_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PerturbSettings(**{**EXACT, "speed_range": (0.8, 1.2)})
    whole, _ = at_once(signals(), settings)
    monkeypatch.setattr(augment, "BYTES_AT_ONCE", 8 * 3 * 14000)
    assert np.array_equal(at_once(signals(), settings)[0], whole)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Alone or beside others in a wider batch: the same but for a rounding, since transforms differ in size."""
    settings = PerturbSettings(speed_range=(0.9, 1.1))
    whole, drawn = at_once(signals()[:3], settings)
    alone, _ = at_once(signals()[:1], settings)
    length = drawn[0].length
    assert np.abs(whole[0, :length].astype(int) - alone[0, :length]).max() <= 1
    assert (whole[0, :length] != alone[0, :length]).mean() < 0.01


def test_draws_are_those_of_earlier_versions() -> None:
    """A run that was begun before draws were apart from changes goes on bit for bit; digest of that version."""
    digest = hashlib.sha256()
    for seed in range(12):
        for length in (1, 200, 9000, 30000):
            audio = (np.random.default_rng(seed).standard_normal(length) * 2000).astype(np.int16)
            digest.update(perturb(audio, 16000, PerturbSettings(**EXACT), np.random.default_rng(seed)).tobytes())
    assert digest.hexdigest()[:32] == "cb7cf654f0721df4b150d9100c279285"


# -- where -------------------------------------------------------------------------------------------------------------


SPEED = PerturbSettings(speed_range=(0.9, 1.1))


def test_the_device_does_what_it_can() -> None:
    assert place(SPEED, on_gpu=True, are_mapped=True) == Placement(True)
    assert place(PerturbSettings(), on_gpu=True, are_mapped=True) == Placement(False)
    assert place(SPEED, on_gpu=False, are_mapped=True) == Placement(False, "there is no GPU in this run")
    assert not place(SPEED, on_gpu=True, are_mapped=False).on_device
    room = SPEED.model_copy(update={"impulse_from": Path("rooms")})
    assert not place(room, on_gpu=True, are_mapped=True).on_device
    workers = SPEED.model_copy(update={"augment_on": "workers"})
    assert place(workers, on_gpu=True, are_mapped=True) == Placement(False, "as set")


@pytest.mark.parametrize(("on_gpu", "are_mapped", "word"), [(False, True, "GPU"), (True, False, "pack")])
def test_what_was_asked_for_and_cannot_be_is_refused(on_gpu: bool, are_mapped: bool, word: str) -> None:
    asked = SPEED.model_copy(update={"augment_on": "device"})
    assert place(asked, on_gpu=True, are_mapped=True).on_device
    with pytest.raises(NotOnDevice, match=word):
        place(asked, on_gpu=on_gpu, are_mapped=are_mapped)


def test_the_line_of_the_summary() -> None:
    settings = SPEED.model_copy(update={"gain_db": (-6.0, 6.0), "noise_from": Path("/data/noise.json")})
    line = describe(settings, Placement(True))
    assert line == "speed 0.9 to 1.1, gain -6 to 6 dB, noise of noise.json; on the GPU, a whole batch at once"
    line = describe(PerturbSettings(speed_factors=(0.9, 1.1)), Placement(False, "as set"))
    assert line == "speed 0.9, 1.1; where it is read (as set)"
