"""Outcome of a run, as `paceline.fit` returns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.observe.records import Finding


@dataclass(frozen=True)
class Result:
    """Outcome of a run, in any mode."""

    status: str
    """`finished`, `early` (patience ran out), `stopped` (a signal asked for it; `--resume auto` goes on) or `diverged`
    (its loss exploded or its weights are not finite: only what came before is saved); of the other modes `evaluated`,
    `predicted` or `measured`."""
    num_steps: int
    loss: float
    """Loss of the last step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last validation, as `set/metric`."""
    best_score: float | None = None
    """The best score of a validation: see `monitor`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by phase."""
    findings: tuple[Finding, ...] = ()
    """Reasons that held the run back, and what to type: the last word on each matter."""
    mode: str = "train_eval"
    """`train`, `train_eval` (with validation), `eval`, `infer` or `benchmark`."""
    predictions: Path | None = None
    """The file that mode `infer` wrote."""
    folder: Path | None = None
    """The run folder, if there is one; of a run at an address, the copy on this machine."""
    address: str | None = None
    """Address of the run, such as `s3://bucket/run`; None where its folder is one of this machine."""
    is_delivered: bool = True
    """False if the last upload to the address failed: `folder` has all of the run, and `resume="auto"` sends it."""
    checkpoint: Path | None = None
    """The last checkpoint of the run; of the modes `eval` and `infer` the one that was used."""
    best: Path | None = None
    """The checkpoint with the best score, for `paceline.load`, `init_from` or `resume`; None where none has one."""
    model: torch.nn.Module | None = field(default=None, repr=False, compare=False)
    """The trained model, in evaluation mode, as the last step left it: on this rank's device and in the dtype that it
    was trained in. `paceline.load(result.folder)` gives the best one in fp32, and its average if the run kept one; with
    `shard` this one is in pieces."""

    @property
    def best_checkpoint(self) -> Path | None:
        """Name of `best` in earlier versions, where `best` was `best_score`."""
        return self.best
