"""Features to pack, computed by a network's own front end without dither, and the check that they fit a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.paths import near
from paceline.data.packed.errors import PackedMisfit, is_packed
from paceline.data.packed.reader import Packed, open_packed
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.sound.features import FeatureSettings, LogMel


class Features:
    """Front end of a network: 16-bit samples to (frames, mels)."""

    def __init__(self, network: str) -> None:
        settings = NetworkSettings.model_validate(read_network(network))
        self.sample_rate = settings.sample_rate
        self._front_end = LogMel(settings.features, settings.sample_rate).eval()
        self.about: Mapping[str, Any] = settings.features.model_dump(mode="json")

    def __call__(self, samples: NDArray[np.int16]) -> NDArray[np.float32]:
        audio = torch.from_numpy(np.array(samples))[None]
        features, frames = self._front_end(audio, torch.tensor([len(samples)], device="cpu"))
        array: NDArray[np.float32] = features[0, :, : int(frames[0])].T.contiguous().numpy()
        return array


def check_packed(
    paths: Sequence[Path], network: NetworkSettings, *, is_perturbed: bool, is_training: bool = True
) -> None:
    """Refuse packed features of another front end, or beside audio, and recordings that were trimmed or not, where the
    network wants the other: training would not notice any of it."""
    _check_trimmed(paths, trims=network.trims(is_training=is_training))
    features = [path for path in paths if is_packed(path) and open_packed(path).of_kind("features") is not None]
    if not features:
        return
    again = f"`paceline pack train.json {near(features[0])} --features --network NETWORK`"
    audio = [path for path in paths if path not in features]
    if audio:
        raise PackedMisfit(features[0], f"holds features, and {near(audio[0])} does not", "give one kind of data")
    if is_perturbed:
        hint = "pack audio (without `--features`), or set no perturbation"
        raise PackedMisfit(features[0], "holds features, which cannot be perturbed as audio can", hint)
    for path in features:
        why = _difference(open_packed(path), network)
        if why:
            raise PackedMisfit(path, f"holds features of another front end: {why}", f"pack it again: {again}")


def _check_trimmed(paths: Sequence[Path], *, trims: bool) -> None:
    """Refuse features with the silence that is to be cut off, and whatever was cut where nothing is to be."""
    for path in filter(is_packed, paths):
        packed = open_packed(path)
        if packed.about.is_trimmed and not trims:
            hint = "set `--trim-silence` (`train`: for training data only), or pack it again without"
            raise PackedMisfit(path, "was packed without the silence at the ends of recordings", hint)
        if trims and not packed.about.is_trimmed and packed.of_kind("features") is not None:
            hint = "pack it again with `--trim-silence`, or set `--trim-silence no`"
            raise PackedMisfit(path, "holds features, from which `trim_silence` can cut nothing", hint)


def _difference(packed: Packed, network: NetworkSettings) -> str:
    """Return how packed features differ from those of the network; empty if they do not."""
    if packed.sample_rate != network.sample_rate:
        return f"of audio at {packed.sample_rate} Hz, and the network hears {network.sample_rate} Hz"
    # Padding is done when a batch is made, and packed features are without dither.
    free = {"pad_to", "dither"}
    theirs, ours = dict(FeatureSettings.model_validate(packed.about.features)), dict(network.features)
    names = [name for name in ours if name not in free and theirs[name] != ours[name]]
    return "; ".join(f"`{name}` is {theirs[name]}, not {ours[name]}" for name in names)
