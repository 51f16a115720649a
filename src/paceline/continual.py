"""Continual learning from Python: the recipe, methods of one's own, and the replay buffer."""

from __future__ import annotations

from paceline.recipes.continual.method import Answer, Method
from paceline.recipes.continual.replay.buffer import ReplayBuffer
from paceline.recipes.continual.replay.table import Field
from paceline.recipes.continual.task import Continual

__all__ = ["Answer", "Continual", "Field", "Method", "ReplayBuffer"]
