"""Settings of a transducer's two small networks, with the names and defaults of NeMo's configurations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.settings import Fraction, Section

Width = Annotated[int, Field(gt=0, le=100_000)]
NARROW = 256
"""Encoders with fewer channels have prediction and joint networks of half the width, as in NeMo's table of sizes."""


class TransducerSettings(Section):
    """A prediction network that reads the labels so far, and a joint network that scores the next one at a frame."""

    pred_hidden: Width = 640
    """Channels of the prediction network: of its embedding and its LSTM."""
    pred_rnn_layers: Annotated[int, Field(gt=0, le=100)] = 1
    """Layers of the LSTM."""
    pred_dropout: Fraction = 0.2
    """Share dropped between these layers and after the last."""
    joint_hidden: Width = 640
    """Channels of the joint network."""
    joint_activation: Literal["relu", "tanh", "sigmoid"] = "relu"
    """Applied to the sum of what both networks say."""
    joint_dropout: Fraction = 0.2
    """Share dropped after it."""
    ctc: bool = False
    """A decoder for CTC beside it (hybrid): it helps in training, and texts are read by the transducer."""

    def num_weights(self, channels: int, num_classes: int) -> int:
        """Weights of the products, biases left out."""
        predicted, joint = self.pred_hidden, self.joint_hidden
        recurrent = self.pred_rnn_layers * 8 * predicted * predicted
        return num_classes * predicted + recurrent + (channels + predicted + num_classes) * joint


def usual_sizes(channels: int, *, ctc: bool) -> TransducerSettings:
    """Return the transducer of an encoder with so many channels, as NeMo's table of sizes has it."""
    width = 320 if channels < NARROW else 640
    return TransducerSettings(pred_hidden=width, joint_hidden=width, ctc=ctc)
