"""Heads: CTC and transducers, with everything in which they differ. Nothing else asks which of them a network has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.grain import Grain
from paceline.recipes.speech.decoding.decoder import GreedyDecoder, TextDecoder
from paceline.recipes.speech.decoding.transducer import MAX_SYMBOLS, TransducerReader, TransducersAreGreedy
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.recipes.speech.network.ctc_objective import Objective
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.network.transducer.decoder import Transcripts, TransducerDecoder
from paceline.recipes.speech.network.transducer.settings import TransducerSettings
from paceline.recipes.speech.streaming.use import StreamsAreForCtc
from paceline.recipes.speech.text.labels import EncodedTexts, required_frames
from paceline.recipes.speech.text.pieces import Pieces


class Head(Protocol):
    """Part of a network that reads labels off the frames of the encoder."""

    can_record: bool
    """True if the loss of training can be recorded as a CUDA graph."""

    def training_loss(self, model: AcousticModel, grain: Grain) -> Tensor:
        """Run the model and return the loss of training, summed over the utterances of a grain."""
        ...

    def loss(self, model: AcousticModel, outputs: Tensor, grain: Grain) -> Tensor:
        """Return the loss of validation, summed over the utterances of a grain, from outputs of the model."""
        ...

    def greedy_decoder(self, model: AcousticModel, labels: Pieces, max_symbols: int = MAX_SYMBOLS) -> TextDecoder:
        """Return a decoder that writes the best label; a transducer writes up to `max_symbols` labels in a frame."""
        ...

    def check_beam(self) -> None:
        """Raise unless outputs of the model can be searched by a beam."""

    def check_windows(self, what: str) -> None:
        """Raise unless long or live audio, `what`, can be read in windows."""

    def required_frames(self, texts: EncodedTexts) -> NDArray[np.int64]:
        """Return the number of frames that each text needs at the output of the network."""
        ...

    def flops(self, frames_per_s: float, labels_per_s: float, scored_s: float) -> float:
        """Return the operations of a forward pass per second of audio.

        The scores of a transducer grow with the length of an utterance, and are counted for `scored_s` seconds.
        """
        ...

    def nemo_names(self) -> Mapping[str, str]:
        """Return the names in NeMo of the weights of the decoder, except those of a prediction network, which are the
        same."""
        ...


class CtcHead:
    """Head that scores the labels of each frame, independent of the labels before."""

    can_record = True

    def __init__(self, network: NetworkSettings, objective: Objective) -> None:
        self._network, self._objective = network, objective

    def training_loss(self, model: AcousticModel, grain: Grain) -> Tensor:
        return _ctc_loss(self._objective, model, outputs_of(model, grain), grain)

    def loss(self, model: AcousticModel, outputs: Tensor, grain: Grain) -> Tensor:
        return _ctc_loss(Objective(), model, outputs, grain)

    def greedy_decoder(self, model: AcousticModel, labels: Pieces, max_symbols: int = MAX_SYMBOLS) -> TextDecoder:
        return GreedyDecoder(labels, frame_seconds=model.frame_seconds)

    def check_beam(self) -> None:
        pass

    def check_windows(self, what: str) -> None:
        pass

    def required_frames(self, texts: EncodedTexts) -> NDArray[np.int64]:
        return required_frames(texts)

    def flops(self, frames_per_s: float, labels_per_s: float, scored_s: float) -> float:
        return frames_per_s * 2 * self._network.channels[-1] * self._network.num_classes

    def nemo_names(self) -> Mapping[str, str]:
        return {f"decoder.conv.{part}": f"decoder.decoder_layers.0.{part}" for part in ("weight", "bias")}


class TransducerHead:
    """Head that scores the next label by a frame and the labels before."""

    can_record = False  # its chunks of scores are computed twice with the same dropout

    def __init__(self, network: NetworkSettings, settings: TransducerSettings) -> None:
        self._network, self._settings = network, settings

    def training_loss(self, model: AcousticModel, grain: Grain) -> Tensor:
        loss: Tensor = model(grain["audio"], grain["lengths"], grain["keys"], _transcripts(model, grain))
        return loss

    def loss(self, model: AcousticModel, outputs: Tensor, grain: Grain) -> Tensor:
        return _transducer(model).loss_sum(outputs, _transcripts(model, grain))

    def greedy_decoder(self, model: AcousticModel, labels: Pieces, max_symbols: int = MAX_SYMBOLS) -> TextDecoder:
        seconds = model.frame_seconds
        return TransducerReader(_transducer(model), labels, frame_seconds=seconds, max_symbols=max_symbols)

    def check_beam(self) -> None:
        raise TransducersAreGreedy

    def check_windows(self, what: str) -> None:
        raise StreamsAreForCtc(what)

    def required_frames(self, texts: EncodedTexts) -> NDArray[np.int64]:
        return np.zeros(len(texts), np.int64)  # it may write all labels in one frame

    def flops(self, frames_per_s: float, labels_per_s: float, scored_s: float) -> float:
        network, settings = self._network, self._settings
        joint, predicted = settings.joint_hidden, settings.pred_hidden
        scores = frames_per_s * labels_per_s * scored_s * 2 * joint * network.num_classes
        recurrent = labels_per_s * 2 * predicted * (8 * predicted * settings.pred_rnn_layers + joint)
        of_ctc = frames_per_s * 2 * network.channels[-1] * network.num_classes if settings.ctc else 0.0
        return scores + recurrent + frames_per_s * 2 * network.channels[-1] * joint + of_ctc

    def nemo_names(self) -> Mapping[str, str]:
        parts = ("weight", "bias")
        names = {f"decoder.joint.{side}.{part}": f"joint.{side}.{part}" for side in ("enc", "pred") for part in parts}
        last = 2 if self._settings.joint_dropout else 1  # NeMo's list: activation, dropout if any, layer of scores
        names |= {f"decoder.joint.out.{part}": f"joint.joint_net.{last}.{part}" for part in parts}
        if self._settings.ctc:
            names |= {f"decoder.ctc.conv.{part}": f"ctc_decoder.decoder_layers.0.{part}" for part in parts}
        return names


def head_of(network: NetworkSettings, objective: Objective | None = None) -> Head:
    """Return the head of a network; `objective` is the loss of training of CTC."""
    if network.transducer is None:
        return CtcHead(network, objective or Objective())
    return TransducerHead(network, network.transducer)


def outputs_of(model: AcousticModel, grain: Grain) -> Tensor:
    """Run the model: log-probabilities of CTC, or frames for a transducer's joint network."""
    outputs: Tensor = model(grain["audio"], grain["lengths"], grain["keys"] if model.training else None)
    return outputs


def output_frames(model: AcousticModel, grain: Grain) -> list[int]:
    """Return the output frames of each utterance, without waiting for the device.

    An utterance that could not be read has 0 frames, so that it adds nothing to a loss and has no text.
    """
    lengths = zip(grain["num_samples"], grain["bad"], strict=True)
    output_length = model.output_frames if grain["audio"].dim() == 3 else model.output_length
    return [output_length(length) if bad is None else 0 for length, bad in lengths]


def _ctc_loss(objective: Objective, model: AcousticModel, outputs: Tensor, grain: Grain) -> Tensor:
    if "out_frames" in grain.data:  # a grain of the ladder, whose lengths are on the device
        return objective.loss_sum(outputs, grain["text"], grain["out_frames"], grain["text_lengths"])
    return objective.loss_sum(outputs, grain["text"], output_frames(model, grain), grain["num_labels"])


def _transcripts(model: AcousticModel, grain: Grain) -> Transcripts:
    return Transcripts.of(grain["text"], output_frames(model, grain), grain["num_labels"])


def _transducer(model: AcousticModel) -> TransducerDecoder:
    assert isinstance(model.decoder, TransducerDecoder)
    return model.decoder
