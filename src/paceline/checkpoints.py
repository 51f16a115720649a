"""Checkpoints of an own loop: `Checkpointer` writes what `collect` returns, `newest` finds it, `restore` loads it."""

from __future__ import annotations

from paceline.train.checkpoint.reader import newest
from paceline.train.checkpoint.writer import Checkpointer
from paceline.train.engine import collect, restore

__all__ = ["Checkpointer", "collect", "newest", "restore"]
