"""A task of a few seconds: say of each frame of a sequence which symbol came two frames before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline

NUM_SYMBOLS = 4
DELAY = 2


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random symbols, 5 to 24 to a sequence."""

    def __init__(self, number: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(5, 25, (number,), generator=random).tolist()
        self.counts = self.lengths  # the loss is over frames
        self._symbols = [torch.randint(NUM_SYMBOLS, (length,), generator=random) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        symbols = self._symbols[number]
        return symbols, F.pad(symbols, (DELAY, 0))[: len(symbols)]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_SYMBOLS, 16)
        self.memory = nn.GRU(16, 32, batch_first=True)
        self.output = nn.Linear(32, NUM_SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:  # (batch, time) -> (batch, time, symbol)
        logits: torch.Tensor = self.output(self.memory(self.embedding(symbols))[0])
        return logits


class Recall(paceline.Task):
    collate = staticmethod(paceline.pad_collate)
    length_unit = "frames"

    def model(self) -> nn.Module:
        return Tagger()

    def train_data(self) -> Sequences:
        return Sequences(400, seed=1)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": Sequences(80, seed=2)}

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        symbols, labels, lengths, _ = grain
        inside = torch.arange(symbols.shape[1], device=lengths.device) < lengths.unsqueeze(1)
        return F.cross_entropy(model(symbols)[inside], labels[inside], reduction="sum"), inside.sum()

    def predict(self, model: nn.Module, grain: paceline.Grain) -> torch.Tensor:
        symbols: torch.Tensor = model(grain[0]).argmax(-1)
        return symbols
