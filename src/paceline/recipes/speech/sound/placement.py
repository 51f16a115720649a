"""Decision where the sound of training utterances is varied: on the GPU, or where they are read."""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.recipes.speech.sound.perturb import PerturbSettings, is_active


class NotOnDevice(PacelineError):
    """`augment_on: device` in a run where the device cannot do it."""

    why: str
    advice: str
    excludes = (
        Exclusion(
            "`--augment-on device`",
            "a run on a CPU",
            "hardware",
            "A GPU varies the sound of a whole batch at once; a CPU does it utterance by utterance, where it reads.",
        ),
        Exclusion(
            "`--augment-on device`",
            "audio files",
            "hardware",
            "Files are decoded on the CPU, one by one, and varied in the same go; packed files (`paceline pack`) are "
            "copied to the GPU as they lie.",
        ),
        Exclusion(
            "`--augment-on device`",
            "`--impulse-from`",
            "hardware",
            "A room sounds for seconds: each sample depends on tens of thousands, and the GPU's kernel, which reads a "
            "few neighbours of each, is made for the rest of the augmentation.",
        ),
    )
    sentence = "`augment_on` is 'device', but {why}"
    hint = "{advice}, or leave out `--augment-on`: the sound is then varied where it is read"


class Placement(NamedTuple):
    """Where, and why not on the device."""

    on_device: bool
    reason: str = ""


def place(settings: PerturbSettings, *, on_gpu: bool, are_mapped: bool) -> Placement:
    """Decide for a run on a GPU or not, of data that lies in packed files as the network hears it or not.

    Raises `NotOnDevice` where the settings ask for what cannot be.
    """
    if not is_active(settings):
        return Placement(False)
    if settings.augment_on == "workers":
        return Placement(False, "as set")
    obstacle = _obstacle(settings, on_gpu=on_gpu, are_mapped=are_mapped)
    if obstacle is None:
        return Placement(True)
    if settings.augment_on == "device":
        raise NotOnDevice(*obstacle)
    return Placement(False, obstacle[0])


def describe(settings: PerturbSettings, placement: Placement) -> str:
    """Return the line of the summary: `speed 0.9 to 1.1, gain -6 to 6 dB; on the GPU, a whole batch at once`."""
    parts = []
    if settings.speed_range is not None:
        parts.append(f"speed {_range(settings.speed_range)}")
    if settings.speed_factors:
        parts.append(f"speed {', '.join(f'{speed:g}' for speed in settings.speed_factors)}")
    if settings.impulse_from is not None:
        parts.append(f"rooms of {settings.impulse_from.name}")
    if settings.shift_ms is not None:
        parts.append(f"shift {_range(settings.shift_ms)} ms")
    if settings.gain_db is not None:
        parts.append(f"gain {_range(settings.gain_db)} dB")
    if settings.noise_from is not None:
        parts.append(f"noise of {settings.noise_from.name}")
    if settings.white_noise_db is not None:
        parts.append(f"white noise {_range(settings.white_noise_db)} dB")
    where = "on the GPU, a whole batch at once" if placement.on_device else f"where it is read ({placement.reason})"
    return f"{', '.join(parts)}; {where}"


def _obstacle(settings: PerturbSettings, *, on_gpu: bool, are_mapped: bool) -> tuple[str, str] | None:
    """Return what keeps the device from it, and what would help."""
    if not on_gpu:
        return "there is no GPU in this run", "train on one"
    if not are_mapped:
        why = "the audio is not packed, or not as the network hears it"
        return why, "pack it at the network's sample rate (`paceline pack train.json train.h5`)"
    if settings.impulse_from is not None:
        return "it makes no rooms", "leave out `--impulse-from`"
    return None


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:g} to {pair[1]:g}"
