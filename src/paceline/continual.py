"""Continual learning from Python: the recipe, methods of one's own, and the replay buffer."""

from __future__ import annotations

from paceline.recipes.continual.method import Answer, Method
from paceline.recipes.continual.task import Continual
from paceline.replay.buffer import ReplayBuffer
from paceline.replay.table import Field

__all__ = ["Answer", "Continual", "Field", "Method", "ReplayBuffer"]
