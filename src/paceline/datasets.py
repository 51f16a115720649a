"""What a data set may tell of itself, and how grains are dealt to ranks."""

from __future__ import annotations

from paceline.data.dataset import DatasetTraits, fingerprint
from paceline.data.partition import grain_ranks

__all__ = ["DatasetTraits", "fingerprint", "grain_ranks"]
