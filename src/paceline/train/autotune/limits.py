"""Limits of `-O4`: kernels and CUDA graphs that are not among its candidates, beside something else that a run has.

Nothing is refused by them. They are declared here once: a run shows the note, docs/together.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.config.settings import TrainConfig
from paceline.speed.precision import Capabilities
from paceline.train.task import Accelerates, Recordable, Task
from paceline.world.installed import has_triton


@dataclass(frozen=True)
class Facts:
    """What decides whether a run may have kernels and graphs."""

    task: Task
    config: TrainConfig
    capabilities: Capabilities
    has_group: bool = False


@dataclass(frozen=True)
class Limit:
    """Something that `-O4` leaves out."""

    beside: str
    """With what, as the user types it or in words."""
    reason: str
    """For the table."""
    note: str
    """For the run that is limited: `{name}` is the device, `{config.field}` a setting."""
    applies: Callable[[Facts], bool]


KERNELS = (
    Limit(
        "a task without kernels",
        "There is nothing to put in.",
        "this task has none of its own",
        lambda facts: not isinstance(facts.task, Accelerates),
    ),
    Limit(
        "a CPU",
        "They are written for GPUs.",
        "{name} is no GPU",
        lambda facts: facts.capabilities.device != "cuda",
    ),
    Limit(
        "no Triton",
        "They are compiled by it.",
        "Triton is not installed (`pip install triton`)",
        lambda facts: not has_triton(),
    ),
    Limit(
        "`--precision`",
        "They compute in bf16.",
        "they compute in bf16, not as --precision {config.precision}",
        lambda facts: facts.config.precision is not None,
    ),
    Limit(
        "`--checkpoint-activations`",
        "They keep what backward needs themselves, and run across the modules that would be recomputed.",
        "they do not go with `checkpoint_activations`",
        lambda facts: bool(facts.config.checkpoint_activations),
    ),
    Limit(
        "`--sync-batchnorm`",
        "Batch norm is inside of them, where ranks do not meet.",
        "they do not go with `sync_batchnorm`",
        lambda facts: facts.config.sync_batchnorm != "no",
    ),
)
GRAPHS = (
    Limit(
        "`--no-cuda-graphs`",
        "They were switched off.",
        "`cuda_graphs` is off",
        lambda facts: not facts.config.cuda_graphs,
    ),
    Limit(
        "a task without `recordable`",
        "A loss that waits for the device, or decides by values, cannot be recorded.",
        "this task does not say that its loss can be recorded",
        lambda facts: not isinstance(facts.task, Recordable),
    ),
    Limit(
        "a task whose `can_record` is False",
        "Its settings ask for a loss that cannot be recorded, as a transducer's, which keeps random states aside.",
        "the loss of these settings cannot be recorded",
        lambda facts: isinstance(facts.task, Recordable) and not facts.task.can_record,
    ),
    Limit(
        "a CPU",
        "They are a feature of GPUs.",
        "{name} is no GPU",
        lambda facts: facts.capabilities.device != "cuda",
    ),
    Limit(
        "`--sync-batchnorm` on several ranks",
        "Ranks meet inside of forward, by collectives that are not recorded.",
        "`sync_batchnorm` joins ranks inside of forward, which is not recorded",
        lambda facts: facts.has_group and facts.config.sync_batchnorm != "no",
    ),
    Limit(
        "`--shard full`, `--shard node` on several ranks",
        "Weights are gathered into memory that is given back after each block; a graph needs them at a fixed place.",
        "with `shard` weights have no fixed place in memory",
        lambda facts: facts.has_group and facts.config.shard != "none",
    ),
    Limit(
        "`--checkpoint-activations`",
        "Random states are kept aside on the host, which cannot be recorded.",
        "`checkpoint_activations` keeps random states aside, which cannot be recorded",
        lambda facts: bool(facts.config.checkpoint_activations),
    ),
)


def why_no_kernels(task: Task, config: TrainConfig, capabilities: Capabilities) -> str | None:
    """Return why the task's own kernels are not among the candidates; None if they are."""
    return _first("kernels", KERNELS, Facts(task, config, capabilities))


def why_no_graphs(task: Task, config: TrainConfig, capabilities: Capabilities, has_group: bool) -> str | None:
    """Return why CUDA graphs are not among the candidates; None if they are."""
    return _first("CUDA graphs", GRAPHS, Facts(task, config, capabilities, has_group))


def _first(part: str, limits: Sequence[Limit], facts: Facts) -> str | None:
    notes = (limit.note for limit in limits if limit.applies(facts))
    note = next(notes, None)
    return None if note is None else f"no {part}: {note.format(name=facts.capabilities.name, config=facts.config)}"
