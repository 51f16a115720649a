"""Optimizers that torch does not have, for loops of one's own."""

from __future__ import annotations

from paceline.optim.lamb import Lamb
from paceline.optim.muon import Muon, hidden_matrices, orthogonalize
from paceline.optim.novograd import NovoGrad

__all__ = ["Lamb", "Muon", "NovoGrad", "hidden_matrices", "orthogonalize"]
