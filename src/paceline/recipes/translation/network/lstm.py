"""LSTM encoder and decoder with attention, after GNMT (Wu et al. 2016) and the recipes of RETURNN and OpenSeq2Seq.

The first layer of the decoder asks the source, and all layers above it see the answer. No layer waits for the attention
of the step before, so that each runs over a whole sentence in one call, by cuDNN on a GPU. Shapes alone decide what is
computed: a backward direction reads sentences that were turned around, instead of packed ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.translation.network.embedding import make_embedding
from paceline.recipes.translation.network.scores import Packings, ScoresTokens
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.text.vocabulary import PAD

Cell = tuple[Tensor, Tensor]
"""Output and memory of an LSTM layer, each (1, rows, width)."""


class TwoWays(nn.Module):
    """Layer that reads a sentence in both directions, each with half of the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.forth, self.back = make_lstm(width, width // 2), make_lstm(width, width - width // 2)

    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        """Return (batch, time, width); `turned` are places of tokens from the last to the first, then of padding."""
        order = turned.unsqueeze(2)
        back = self.back(x.gather(1, order.expand_as(x)))[0]
        return torch.cat([self.forth(x)[0], back.gather(1, order.expand_as(back))], 2)


@dataclass
class LstmState:
    """Position of sentences that are being written, one per row."""

    memory: Tensor
    mask: Tensor
    """(rows, 1, source time), True for tokens."""
    cells: list[Cell | None] = field(default_factory=list)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be there several times."""
        self.memory, self.mask = self.memory[rows], self.mask[rows]
        self.reorder(rows)

    def reorder(self, rows: Tensor) -> None:
        """Put rows in another order that exchanges only rows of one source."""
        self.cells = [None if cell is None else (cell[0][:, rows], cell[1][:, rows]) for cell in self.cells]


class Lstm(ScoresTokens):
    """Tokens in, scores of the next token out."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape, self.vocabulary = shape, vocabulary
        width = shape.width
        self.embedding = make_embedding(vocabulary, width)
        self.target_embedding = make_embedding(vocabulary, width) if shape.share != "all" else None
        self.output = nn.Linear(width, vocabulary, bias=False) if shape.share == "none" else None
        self.encoder = nn.ModuleList(TwoWays(width) for _ in range(shape.encoder_layers))
        self.query = nn.Linear(width, width, bias=False)
        widths = [width, *[2 * width] * (shape.decoder_layers - 1)]
        self.decoder = nn.ModuleList(make_lstm(entering, width) for entering in widths)
        self.join = nn.Linear(2 * width, width)

    def hidden(self, source: Tensor, target: Tensor, packings: Packings | None = None) -> Tensor:
        """Return (batch, target time, width), from which the last layer computes scores."""
        assert packings is None, "refused with the settings"
        memory, mask = self._read(source)
        out, _ = self._write(target, memory, mask, [None] * len(self.decoder))
        return out

    def begin(self, source: Tensor) -> LstmState:
        """Read the source, before the first token is written."""
        memory, mask = self._read(source)
        return LstmState(memory, mask, [None] * len(self.decoder))

    def step(self, tokens: Tensor, state: LstmState) -> Tensor:
        """Return scores of the token that follows, (rows, vocabulary); `tokens` are the last ones, (rows)."""
        hidden, cells = self._write(tokens.unsqueeze(1), state.memory, state.mask, state.cells)
        state.cells = [*cells]
        return self.head(hidden).squeeze(1)

    def _read(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return what was read, (batch, time, width), and which of it are tokens."""
        is_token = source != PAD
        turned = turn(is_token)
        x = self._drop(self.embedding(source) * math.sqrt(self.shape.width))
        for number, layer in enumerate(self.encoder):
            out = self._drop(layer(x, turned))
            x = out if number == 0 else x + out
        return x, is_token.unsqueeze(1)

    def _write(
        self, target: Tensor, memory: Tensor, mask: Tensor, cells: list[Cell | None]
    ) -> tuple[Tensor, list[Cell]]:
        embedding = self.target_embedding or self.embedding
        x, first = self.decoder[0](self._drop(embedding(target) * math.sqrt(self.shape.width)), cells[0])
        answer = F.scaled_dot_product_attention(self.query(x), memory, memory, mask)
        new: list[Cell] = [first]
        x = self._drop(x)
        for layer, cell in zip(list(self.decoder)[1:], cells[1:], strict=True):
            out, after = layer(torch.cat([x, answer], 2), cell)
            new.append(after)
            x = x + self._drop(out)
        return self._drop(torch.tanh(self.join(torch.cat([x, answer], 2)))), new

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.shape.dropout, self.training)


def turn(is_token: Tensor) -> Tensor:
    """Return (batch, time): the place of the last token, of the one before it, ... of the first, then of padding."""
    places = torch.arange(is_token.shape[1], device=is_token.device)
    number = is_token.sum(1, keepdim=True)
    return torch.where(places < number, number - 1 - places, places)


def make_lstm(entering: int, width: int) -> nn.LSTM:
    lstm = nn.LSTM(entering, width, batch_first=True)
    with torch.no_grad():
        lstm.get_parameter("bias_ih_l0")[width : 2 * width] += 1.0  # memory is kept at first
    return lstm
