"""Contents of a training run's checkpoint: parts with tensors, and plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from paceline.train.checkpoint import state
from paceline.train.checkpoint.format import STATE, CheckpointBroken
from paceline.train.checkpoint.memory import same_on_all
from paceline.train.checkpoint.pieces import Parts
from paceline.train.checkpoint.reader import Checkpoint
from paceline.train.position import Position
from paceline.train.stepper import Stepper
from paceline.train.task import Task, about_of, state_of
from paceline.world.link import Link


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """Plain values of a run, in the order of `state.json`. Fields without a default are in every checkpoint."""

    engine: dict[str, Any]
    """See `state.collect`."""
    position: dict[str, Any]
    so_far: dict[str, Any] | None = None
    """Sums of the epoch that is being trained."""
    precision: str | None = None
    world_size: int
    choice: dict[str, Any] | None = None
    """Choice of the autotuner."""
    few_shapes: bool = False
    """True if batches are padded to few shapes."""
    sums: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What the task says about itself."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> RunValues:
        """Return the values of a checkpoint. Raises `CheckpointBroken` for a sound one that is not of a training run,
        such as one of an own loop."""
        missing = sorted(state.required(state.EngineParts) - checkpoint.parts.keys())
        missing += sorted(state.required(cls) - checkpoint.state.keys())
        if missing:
            raise CheckpointBroken(checkpoint.path, STATE, f"is not of a training run: it has no {', '.join(missing)}")
        return cls(**{each.name: checkpoint.state[each.name] for each in fields(cls) if each.name in checkpoint.state})


@dataclass(frozen=True)
class RunState:
    """Objects whose state goes into a checkpoint."""

    engine: Stepper
    position: Position
    task: Task
    so_far: Callable[[], dict[str, Any] | None]
    """Returns the sums of the epoch as plain values. All ranks call it."""
    choice: dict[str, Any] | None = None
    """Choice of the autotuner."""
    few_shapes: bool = False
    more: Callable[[], Mapping[str, Mapping[str, Tensor]]] = dict
    """Returns further parts. All ranks call it."""


def collect_run(
    run: RunState, link: Link, *, in_pieces: bool, is_replicated: bool = False, takes_part: bool = True
) -> tuple[Parts, RunValues] | None:
    """Return the parts and values of a run, with references to live tensors. All ranks must call it inside
    `Stepper.whole_statistics`.

    What only one rank has goes to the first rank, and with `is_replicated` from there to all others; then batch-norm
    statistics are kept as their total only, because the ranks may change. `in_pieces` leaves every rank its own pieces
    of a sharded model. The result is None on a rank that does not take part: one that neither writes nor has pieces.
    """
    engine = run.engine
    own = state.collect_own(engine)  # of ranks that step apart
    further: Parts = {
        f"{state.RANK}{rank}": tensors for rank, tensors in enumerate(link.gather_tensors(own) if own else [])
    }
    shares = {} if is_replicated else engine.prepared.statistics.state()
    gathered = link.gather_tensors(shares) if shares else []
    if gathered:
        further[state.STATISTICS] = state.pack_shares(gathered)
    so_far = run.so_far()
    task_state = state_of(run.task)  # on all ranks: it may be spread over them
    if task_state:
        further["task"] = task_state
    further |= run.more()
    if is_replicated:
        names = link.broadcast_object(list(further))
        further = {part: same_on_all(link, further.get(part, {})) for part in names}
    if not takes_part:
        return None
    parts, engine_values = state.collect(engine, in_pieces)
    values = RunValues(
        engine={**engine_values, "batches": [run.position.epoch, run.position.step, 0]},
        position=run.position.state(),
        so_far=so_far,
        precision=engine.precision.name,
        world_size=link.world.size,
        choice=run.choice,
        few_shapes=run.few_shapes,
        sums=engine.config.sums,
        about=about_of(run.task),
    )
    return {**parts, **further}, values
