"""The one interface of all that follows a run: `metrics.jsonl`, TensorBoard, W&B, MLflow, a user's own callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError

Record = dict[str, Any]
Samples = dict[str, list[dict[str, str]]]
"""By validation set: some samples, each as texts by name."""


class NotAWatcher(PacelineError):
    """Something else was given where a watcher belongs."""

    hint = "subclass `paceline.observe.callback.Watcher`, override what you need, and give an object of it"

    def __init__(self, given: Any) -> None:
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        super().__init__(f"{what} is no watcher")


@dataclass(frozen=True)
class RunInfo:
    """What a watcher is told when a run starts or goes on."""

    task: str
    folder: Path | None = None
    """The run folder; None where nothing is written."""
    settings: dict[str, Any] = field(default_factory=dict)
    next_step: int = 0
    """First step that this process will do: above 0 when a run is resumed."""
    world_size: int = 1


class Watcher:
    """Subclass it and override what you need. Only the first rank has watchers.

    Records are plain dictionaries, the lines of `metrics.jsonl`; `step` in them counts from 0 over the whole run.
    """

    def start(self, info: RunInfo) -> None:
        """Before the first step."""

    def step(self, records: list[Record]) -> None:
        """Steps since the last call (step, epoch, loss, lr), handed over together every `log_every` steps."""

    def epoch(self, record: Record) -> None:
        """An epoch has ended: its mean loss, where the time went on each rank, padding, samples per second."""

    def validation(self, record: Record) -> None:
        """Metrics of all validation sets as `set/metric`; `samples`, where the task shows some."""

    def end(self, status: str) -> None:
        """The run is over: `finished`, `early`, `stopped` or `failed`. Called once, whatever happened."""


def checked(watchers: Sequence[Any]) -> list[Watcher]:
    """The watchers, if that is what they are."""
    for watcher in watchers:
        if not isinstance(watcher, Watcher):
            raise NotAWatcher(watcher)
    return list(watchers)
