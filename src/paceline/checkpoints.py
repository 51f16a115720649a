"""Checkpoints of an own loop: `Checkpointer` writes what `collect` returns, `newest` finds it, `restore` loads it."""

from __future__ import annotations

from paceline.train.checkpoint import Checkpointer, collect, newest, restore

__all__ = ["Checkpointer", "collect", "newest", "restore"]
