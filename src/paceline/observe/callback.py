"""Callback: the one interface of all that follows a run, from `metrics.jsonl` and TensorBoard to a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import WrongType
from paceline.observe.records import Json

Record = Json


@dataclass(frozen=True)
class RunInfo:
    """Facts that a callback gets when a run starts or goes on."""

    task: str
    folder: Path | None = None
    """The run folder; None where nothing is written."""
    settings: dict[str, Any] = field(default_factory=dict)
    next_step: int = 0
    """First step that this process will do: above 0 when a run is resumed."""
    world_size: int = 1
    stop: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Call it to end the run soon: all ranks finish their step, save and leave, and its status is `stopped`."""


class Callback:
    """Subclass it and override what you need. Only the first rank has callbacks.

    Records are plain dictionaries, the lines of `metrics.jsonl`; `step` in them counts from 0 over the whole run,
    `epoch` from 1 in its stage.
    `paceline.observe.records` has a class for each kind, with `from_json`.
    """

    def start(self, info: RunInfo) -> None:
        """Called before the first step."""

    def step(self, records: list[Record]) -> None:
        """Steps since the last call (step, epoch, loss, lr, and `gradient_norm` where it is known), handed over
        together every `log_every` steps."""

    def progress(self, record: Record) -> None:
        """How far the run is (epoch, epochs, share `done`, seconds `left_s`) and how fast (`samples_per_s`)."""

    def epoch(self, record: Record) -> None:
        """An epoch has ended: its mean loss, where the time went on each rank, padding, samples per second."""

    def validation(self, record: Record) -> None:
        """Metrics of all validation sets as `set/metric`; `samples`, where the task shows some."""

    def ranks(self, record: Record) -> None:
        """The run goes on with other ranks: who was lost, who has joined (`--on-failure continue`)."""

    def end(self, status: str) -> None:
        """The run is over: `finished`, `early`, `stopped` or `failed`. Called once, whatever happened."""


Watcher = Callback
"""Name of `Callback` in earlier versions."""


def checked(callbacks: Iterable[Any]) -> list[Callback]:
    """Return the callbacks, if that is what they are."""
    if not isinstance(callbacks, Iterable):
        what = "None" if callbacks is None else f"an object of {type(callbacks).__name__}"
        raise WrongType(
            f"callbacks must be given as a list, not as {what}", hint="write them as a list: `[]`, or `[MyCallback()]`"
        )
    callbacks = list(callbacks)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            of_class = isinstance(callback, type)
            what = f"the class {callback.__name__}" if of_class else f"an object of {type(callback).__name__}"
            raise WrongType(
                f"{what} is not a `paceline.Callback`",
                hint="subclass `paceline.Callback`, override what you need, and give an object of it",
            )
    return callbacks
