"""Acoustic model from audio to letters: front end, masks for training, encoder, decoder, as one module that knows only
tensors."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from paceline.core.keys_torch import keyed
from paceline.core.torch_private import mark_dynamic, not_compiled
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.recipes.speech.network.encoder import make_decoder, make_encoder
from paceline.recipes.speech.network.transducer.decoder import Shares, Transcripts
from paceline.recipes.speech.sound.features import LogMel
from paceline.recipes.speech.sound.key_streams import KeyStream
from paceline.recipes.speech.sound.spec_augment import SpecAugment, SpecAugmentSettings


class AcousticModel(nn.Module):
    """Log-probabilities of labels and blank, for every frame of int16 audio; of a transducer, what its joint network
    takes from each frame."""

    def __init__(
        self,
        network: NetworkSettings,
        *,
        spec_augment: bool = True,
        views: int = 1,
        inter_layers: tuple[int, ...] = (),
        shares: Shares | None = None,
    ) -> None:
        """In training an utterance is masked in `views` ways, and the decoder reads the layers `inter_layers`, too;
        `shares` are the parts of a transducer's loss."""
        super().__init__()
        self.views, self.inter_layers = views, inter_layers
        self.features = LogMel(network.features, network.sample_rate)
        self.spec_augment = SpecAugment(network.spec_augment if spec_augment else SpecAugmentSettings())
        self.encoder = make_encoder(network)
        self.decoder = make_decoder(network, shares)

    def forward(
        self, audio: Tensor, lengths: Tensor, keys: Tensor | None = None, transcripts: Transcripts | None = None
    ) -> Tensor:
        """(batch, samples) with their true lengths -> (batch, frames, labels + 1), the blank last; of a transducer
        (batch, frames, joint channels), or with `transcripts` the sum of the losses.

        Features that were computed before are taken as (batch, frames, mels).

        `keys` decide which noise and which masks an utterance gets in training. With them and with several views or
        layers, the first axis is (layer, view, batch), flat, the last layer first.
        """
        features, frames = self._hear(audio, lengths, keys)
        capture = self.inter_layers if keys is not None and self.training else ()
        features = features.to(self._dtype)
        encoded, _ = self.encoder(features, frames, capture) if capture else self.encoder(features, frames)
        output: Tensor = self.decoder(encoded) if transcripts is None else self.decoder(encoded, transcripts)
        return output

    @not_compiled
    def _hear(self, audio: Tensor, lengths: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return masked features and their lengths. Nothing is won by compiling this: FFT and gathers are kernels
        already."""
        if audio.dim() == 3:
            features, frames = self.features.computed(audio), lengths
        else:
            features, frames = self.features(audio, lengths, keys)
        if keys is not None and self.training and self.views > 1:
            others = [keyed(keys, KeyStream.VIEWS, number) for number in range(1, self.views)]
            features = torch.cat([self.spec_augment(features, frames, each) for each in (keys, *others)])
            frames = frames.repeat(self.views)
        elif keys is not None:
            features = self.spec_augment(features, frames, keys)
        # Batches differ in size and length: what is compiled next is to be compiled once, not for the first of them.
        for tensor, sizes in ((features, (0, 2)), (frames, (0,))):
            mark_dynamic(tensor, sizes)
        return features, frames

    def output_length(self, num_samples: int) -> int:
        """Return the number of output frames for `num_samples` of audio."""
        return self.output_frames(self.features.num_frames(num_samples))

    def output_frames(self, num_frames: int) -> int:
        """Return the number of output frames for `num_frames` of features."""
        return self.encoder.output_length(num_frames)

    @property
    def frame_seconds(self) -> float:
        """Seconds from one output frame to the next."""
        many = 1 << 20
        factor = round(many / self.output_frames(many))
        return factor * self.features.hop_samples / self.features.sample_rate

    @property
    def _dtype(self) -> torch.dtype:
        return self.decoder.weight_dtype


def acoustic(model: nn.Module) -> AcousticModel:
    """Return the module that the trainer hands to a speech task with its type: it is what `Asr.model` has returned."""
    return cast(AcousticModel, model)
