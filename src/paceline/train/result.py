"""What came out of a run, whatever its mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.observe.verdict import Finding


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    status: str
    """`finished`, `early` (patience ran out) or `stopped` (a signal asked for it; `--resume auto` goes on); of the
    other modes `evaluated`, `predicted` or `measured`."""
    num_steps: int
    loss: float
    """Of the last step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last validation, as `set/metric`."""
    best: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went, by phase."""
    findings: tuple[Finding, ...] = ()
    """What held the run back, and what to type: the last word on each matter."""
    mode: str = "train_eval"
    """As in the settings, or `benchmark`."""
    predictions: Path | None = None
    """The file that mode `infer` wrote."""
