"""Calibration: what a run's journal tells about its steps, as far as speed elsewhere depends on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.train.predict.links import LinkSpeed


@dataclass(frozen=True)
class Manner:
    """Settings of how ranks come to one model."""

    reduce: str = "grad"
    sums: str = "exact"
    wire: str = "full"
    shard: str = "none"
    sync_step: int | None = None
    sync_seconds: float | None = None
    sync_overlap: int = 0


@dataclass(frozen=True)
class StepSamples:
    """Sampled steps of one rank; sequences are by step."""

    work: Sequence[float]
    """Padded cost of its grains: samples x longest, or samples."""
    num_grains: Sequence[float]
    data_s: Sequence[float]
    compute_s: Sequence[float]
    """Forward and backward of all grains."""
    communication_s: Sequence[float]
    """Waiting for other ranks."""
    update_s: Sequence[float]
    other_s: Sequence[float]


@dataclass(frozen=True)
class Calibration:
    """Measurements of a run that a prediction is made of."""

    name: str
    ranks: int
    nodes: int
    device: str
    """`cpu` or a GPU's name."""
    manner: Manner
    samples: Sequence[StepSamples]
    """By rank."""
    costs: Sequence[Sequence[float]]
    """Of sampled steps: the costs of all grains of the global batch, which do not depend on the number of ranks."""
    lengths: Sequence[float]
    """Some lengths of the data; empty where it has none."""
    global_batch: float
    """Samples of a step, mean."""
    grains: int
    total_steps: int | None
    """Steps of the whole run, where that is known."""
    backward_s: float
    """Last backward of a step, in which buckets are sent."""
    bucket_bytes: Sequence[int]
    bucket_ready: Sequence[float]
    """Share of the last backward after which each bucket can be sent."""
    block_bytes: Sequence[int]
    """Blocks that `--shard full` would cut the model into, the root last."""
    average_bytes: Sequence[int]
    """Pieces that `--reduce param` averages: weights, buffers, optimizer state."""
    link: LinkSpeed | None
    """Over which the run's ranks met, where that is known."""
    save_s: float | None
    """Cost of a checkpoint to the steps."""
    recovery_s: float | None
    """Measured recovery from a lost rank."""


def calibrate(folders: Sequence[Path], link: LinkSpeed | None = None) -> Calibration:
    """Return the calibration of runs of one task, such as one on 1 rank and one on 2; `link` is the one they used."""
    raise NotImplementedError
