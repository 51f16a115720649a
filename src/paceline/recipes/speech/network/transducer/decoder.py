"""Decoder of a transducer: a prediction network reads the labels so far, a joint network adds what it says to what the
encoder says of a frame, and scores the next label or blank. Parameters have NeMo's names.

A text begins with nothing: the prediction network reads zeros first, which is also the embedding of the blank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.torch_private import not_compiled
from paceline.recipes.speech.network.ctc_decoder import Decoder
from paceline.recipes.speech.network.ctc_objective import Objective
from paceline.recipes.speech.network.transducer.settings import TransducerSettings
from paceline.recipes.speech.text.transducer import transducer_loss_sum

_ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


class State(NamedTuple):
    """Memory of the prediction network: output and cell of each layer, (layers, batch, channels)."""

    output: Tensor
    cell: Tensor

    def updated(self, rows: Tensor, other: State) -> State:
        """Return the other state where `rows`, (batch,) bool, are true."""
        chosen = rows.view(1, -1, 1)
        return State(torch.where(chosen, other.output, self.output), torch.where(chosen, other.cell, self.cell))


class Transcripts(NamedTuple):
    """Texts of a batch."""

    targets: Tensor
    """(batch, labels), padded with anything."""
    num_frames: Tensor
    """(batch,) int64 on the host: output frames of each utterance; 0 for one that adds nothing."""
    num_labels: Tensor
    """(batch,) int64 on the host."""

    @classmethod
    def of(cls, targets: Tensor, num_frames: list[int], num_labels: list[int]) -> Transcripts:
        sizes = torch.tensor([num_frames, num_labels], dtype=torch.int64, device="cpu")
        return cls(targets, sizes[0], sizes[1])


@dataclass(frozen=True)
class Shares:
    """Parts of the loss of training."""

    ctc_weight: float = 0.0
    """Share of CTC in the loss of a hybrid."""
    ctc: Objective = field(default_factory=Objective)
    """Weights of the layers that CTC reads."""
    fastemit: float = 0.0
    """See `transducer_loss_sum`."""


class TransducerDecoder(nn.Module):
    """Scores of labels and blank for pairs of a frame and a text so far."""

    def __init__(self, settings: TransducerSettings, channels: int, num_classes: int, shares: Shares) -> None:
        super().__init__()
        self.settings, self.num_classes, self.shares = settings, num_classes, shares
        self.prediction = Prediction(settings, num_classes)
        self.joint = Joint(settings, channels, num_classes)
        self.ctc = Decoder(channels, num_classes) if settings.ctc else None

    def forward(self, encoded: Tensor, transcripts: Transcripts | None = None) -> Tensor:
        """(batch, channels, time) -> (batch, time, joint channels), from which texts are read and losses computed.

        With transcripts, the loss of training instead, summed over utterances. Further layers for CTC follow along the
        batch.
        """
        return self._project(encoded) if transcripts is None else self._training_loss(encoded, transcripts)

    def _project(self, encoded: Tensor) -> Tensor:
        """Return what the joint network takes from each frame."""
        frames: Tensor = self.joint.enc(encoded.transpose(1, 2))
        return frames

    @not_compiled
    def loss_sum(self, frames: Tensor, transcripts: Transcripts) -> Tensor:
        """Return the transducer's loss, summed over the utterances of a batch, from what `forward` returns."""
        num_frames, num_labels = transcripts.num_frames.tolist(), transcripts.num_labels.tolist()
        targets = transcripts.targets[:, : max(num_labels)].to(frames.device, torch.int64, non_blocking=True)
        states = self.joint.pred(self.prediction(targets))
        return transducer_loss_sum(
            self.joint.scores,
            frames,
            states,
            targets,
            num_frames,
            num_labels,
            num_classes=self.num_classes,
            fastemit=self.shares.fastemit,
        )

    @not_compiled
    def _training_loss(self, encoded: Tensor, transcripts: Transcripts) -> Tensor:
        loss = self.loss_sum(self._project(encoded[: len(transcripts.num_frames)]), transcripts)
        if self.ctc is None:
            return loss
        share = self.shares.ctc_weight
        return (1 - share) * loss + share * self.shares.ctc.loss_sum(self.ctc(encoded), *transcripts)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the network's computation without autocast."""
        return self.joint.enc.weight.dtype

    # -- one label at a time -------------------------------------------------------------------------------------

    def begin(self, batch: int) -> tuple[Tensor, State]:
        """Return what the joint network takes from texts without a label, (batch, joint channels), and their state."""
        return self._step(self.joint.enc.weight.new_zeros(batch, 1, self.settings.pred_hidden), None)

    def go_on(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the same after one more label each, (batch,)."""
        return self._step(self.prediction.embed(labels).unsqueeze(1), state)

    def _step(self, entering: Tensor, state: State | None) -> tuple[Tensor, State]:
        output, after = self.prediction.dec_rnn(entering.transpose(0, 1), state)
        return self.joint.pred(output[0]), after


class Prediction(nn.Module):
    """Embedding and LSTM."""

    def __init__(self, settings: TransducerSettings, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_classes, settings.pred_hidden, padding_idx=num_classes - 1)
        self.dec_rnn = RecurrentLayers(settings)

    def forward(self, targets: Tensor) -> Tensor:
        """(batch, labels) -> (batch, labels + 1, channels): after nothing, after the first label, ..."""
        inside = torch.where((targets >= 0) & (targets < self.embed.num_embeddings), targets, 0)
        entering = F.pad(self.embed(inside), (0, 0, 1, 0))  # zeros before the first label
        output: Tensor = self.dec_rnn(entering.transpose(0, 1), None)[0]
        return output.transpose(0, 1)


class RecurrentLayers(nn.Module):
    """LSTM, with dropout after each layer. It is not computed under autocast: it is small, and adds up over labels."""

    def __init__(self, settings: TransducerSettings) -> None:
        super().__init__()
        width, layers, share = settings.pred_hidden, settings.pred_rnn_layers, settings.pred_dropout
        self.lstm = nn.LSTM(width, width, layers, dropout=share if layers > 1 else 0.0)
        self.share = share
        with torch.no_grad():
            for layer in range(layers):  # memory is kept at first
                self.lstm.get_parameter(f"bias_ih_l{layer}")[width : 2 * width] = 1.0
                self.lstm.get_parameter(f"bias_hh_l{layer}")[width : 2 * width] = 0.0

    def forward(self, entering: Tensor, state: State | None) -> tuple[Tensor, State]:
        """(labels, batch, channels) -> the same, and the memory after the last label."""
        with torch.autocast(entering.device.type, enabled=False):
            output, after = self.lstm(entering.to(self.lstm.get_parameter("weight_ih_l0").dtype), state)
        return F.dropout(output, self.share, self.training), State(*after)


class Joint(nn.Module):
    """Sum of both sides, activation, scores."""

    def __init__(self, settings: TransducerSettings, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pred = nn.Linear(settings.pred_hidden, settings.joint_hidden)
        self.enc = nn.Linear(channels, settings.joint_hidden)
        self.out = nn.Linear(settings.joint_hidden, num_classes)
        self.activation, self.share = settings.joint_activation, settings.joint_dropout

    def scores(self, frames: Tensor, states: Tensor) -> Tensor:
        """(batch, frames, channels), (batch, states, channels) -> (batch, frames, states, classes), not normalised."""
        return self.forward(frames.unsqueeze(2) + states.unsqueeze(1))

    def forward(self, summed: Tensor) -> Tensor:
        """(..., channels) -> (..., classes)."""
        hidden = _ACTIVATIONS[self.activation](summed)
        scores: Tensor = self.out(F.dropout(hidden, self.share, self.training))
        return scores
