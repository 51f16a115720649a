"""Lines of `metrics.jsonl` as classes, with `from_json`, and what they say held an epoch back."""

from __future__ import annotations

from paceline.observe.records import EpochRecord, Finding, ProgressRecord, RanksRecord, StepRecord, ValidationRecord
from paceline.observe.verdict import verdict

__all__ = ["EpochRecord", "Finding", "ProgressRecord", "RanksRecord", "StepRecord", "ValidationRecord", "verdict"]
