"""Features for `paceline pack --features`: those of a network's own front end, without dither."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.recipes.asr.features import LogMel
from paceline.recipes.asr.network import NetworkSettings, read_network


class Features:
    """From 16-bit samples to (frames, mels), as the network would compute them."""

    def __init__(self, network: str) -> None:
        settings = NetworkSettings.model_validate(read_network(network))
        self.sample_rate = settings.sample_rate
        self._front_end = LogMel(settings.features, settings.sample_rate).eval()
        self.about: dict[str, Any] = settings.features.model_dump(mode="json")

    def __call__(self, samples: NDArray[np.int16]) -> NDArray[np.float32]:
        audio = torch.from_numpy(np.array(samples))[None]
        features, frames = self._front_end(audio, torch.tensor([len(samples)]))
        found: NDArray[np.float32] = features[0, :, : int(frames[0])].T.contiguous().numpy()
        return found
