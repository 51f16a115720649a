"""Learning rates of an optimizer's groups: the schedule of the settings, rates of the user's own, torch's schedulers.

A group follows the schedule unless somebody else sets its rate. A rate that a task gives its optimizer is scaled by the
schedule, not replaced; a group that a torch scheduler moves, or whose rate is changed by hand, is left alone.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.config.settings import OptimSettings
from paceline.core.errors import TaskContract, first_line
from paceline.core.units import counted
from paceline.optim.state import OWN_LR
from paceline.world.values import decode, encode

SCHEDULED = "initial_lr"
"""Entry that every torch scheduler leaves in the groups that it moves."""
_MOVED = (SCHEDULED, "lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Entries of a group that torch's schedulers change."""
_OF_SCHEDULE = ("lr", "schedule", "warmup_steps", "warmup_ratio", "hold_steps", "min_lr", "scale_lr")
STEPPED = "scheduler"
"""Name of the scheduler that is stepped for the user, in a checkpoint."""


def mark_own(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Mark the groups whose learning rate is not what the settings' `lr` gives them."""
    for group in optimizer.param_groups:
        if SCHEDULED not in group and float(group["lr"]) != lr * group.get("lr_scale", 1.0):
            group[OWN_LR] = group["lr"]


class Rates:
    """Sets the learning rates of an optimizer before every step."""

    def __init__(self) -> None:
        self._schedule: Callable[[int], float] | None = None
        self._peak: float | None = None
        self._tell: Callable[[str], None] = lambda line: None
        self._written: list[Any] = []
        self._theirs: set[int] = set()

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Start with an optimizer whose rates are as it was made."""
        self._written = [group["lr"] for group in optimizer.param_groups]
        self._theirs = set()

    def follow(
        self,
        schedule: Callable[[int], float],
        peak: float | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Set rates to `schedule(step)`, whatever they were; with the schedule's `peak`, respect those of others."""
        self._schedule, self._peak = schedule, peak
        self._tell = tell or self._tell

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float | None:
        """Set the rates of a step; return the one to show."""
        groups = optimizer.param_groups
        if self._schedule is None:
            return as_number(groups[0]["lr"])
        rate, follows = self._schedule(step), False
        factor = 1.0 if self._peak is None else rate / self._peak
        for number, group in enumerate(groups):
            if self._peak is not None and self._is_theirs(number, group):
                continue
            own = None if self._peak is None else group.get(OWN_LR)
            follows = follows or own is None
            lr = rate * group.get("lr_scale", 1.0) if own is None else own if factor == 1.0 else own * factor
            group["lr"] = self._written[number] = lr
        return rate if follows else as_number(groups[0]["lr"])

    def _is_theirs(self, number: int, group: Mapping[str, Any]) -> bool:
        """Return True if a scheduler moves the group, or if its rate is not what was written last."""
        lr, before = group["lr"], self._written[number]
        if SCHEDULED in group or number in self._theirs:
            return True
        if lr is before or (not isinstance(lr, Tensor) and lr == before):
            return False
        self._theirs.add(number)
        self._tell(f"the learning rate of group {number} was changed to {shown(lr)} by the task: it is left to it")
        return True


class Schedulers:
    """torch schedulers of the optimizer: one that is stepped here, and those that the user steps; all are saved."""

    def __init__(self) -> None:
        self._by_name: dict[str, LRScheduler] = {}
        self._saved: dict[str, Tensor] = {}
        self._is_first = True

    @property
    def stepped(self) -> LRScheduler | None:
        return self._by_name.get(STEPPED)

    @property
    def names(self) -> list[str]:
        """Kinds of all schedulers, for people."""
        return [type(scheduler).__name__ for scheduler in self._by_name.values()]

    def add(self, name: str, scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
        """Keep a scheduler's state under a name; one that was saved goes on where it was."""
        if scheduler.optimizer is not optimizer:
            raise TaskContract(
                f"the {type(scheduler).__name__} moves the learning rates of another optimizer than the one that "
                "trains the model",
                hint="make it with the optimizer that is handed over: `def scheduler(self, optimizer, num_steps):`",
            )
        self._by_name[name] = scheduler
        self._restore(name)

    def forget(self) -> None:
        """Let go of all schedulers, whose optimizer is no longer used."""
        self._by_name, self._is_first = {}, True

    def restart(self) -> None:
        """Let the rates of the scheduler that is stepped here begin anew, so that another one can be made."""
        scheduler = self._by_name.pop(STEPPED, None)
        for group in [] if scheduler is None else scheduler.optimizer.param_groups:
            group["lr"] = group.pop(SCHEDULED, group["lr"])

    def step(self) -> None:
        """Move the rates, after an update."""
        scheduler = self._by_name.get(STEPPED)
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
            return
        try:
            self._step(scheduler)
        except ValueError as error:
            raise TaskContract(
                f"the {type(scheduler).__name__} failed when it was stepped: {first_line(error)}",
                hint="make it for all steps of the run: `def scheduler(self, optimizer, num_steps):`",
            ) from error

    def _step(self, scheduler: LRScheduler) -> None:
        if not self._is_first:
            scheduler.step()
            return
        self._is_first = False
        with warnings.catch_warnings():  # torch warns where the first update was skipped for an overflow
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            scheduler.step()

    def check_length(self, num_steps: int | None) -> None:
        """Raise `TaskContract` if a scheduler that knows its end (`OneCycleLR`) has fewer steps than the run."""
        scheduler = self.stepped
        total = None if scheduler is None else vars(scheduler).get("total_steps")
        if isinstance(total, int) and num_steps is not None and total < num_steps:
            raise TaskContract(
                f"the {type(scheduler).__name__} ends after {counted(total, 'step')}, but the run has {num_steps}",
                hint="make it with `num_steps` of `def scheduler(self, optimizer, num_steps):`; a resumed run "
                "continues with the scheduler that it was saved with",
            )

    @property
    def waits_for_scores(self) -> bool:
        """True if the scheduler that is stepped here moves after validations."""
        return isinstance(self.stepped, ReduceLROnPlateau)

    def validated(self, score: float) -> None:
        """Tell a scheduler that waits for it (`ReduceLROnPlateau`) the monitored score."""
        scheduler = self._by_name.get(STEPPED)
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(score)

    def state(self) -> dict[str, Tensor]:
        """Return the state of all schedulers, and of what they move, for a checkpoint."""
        return {name: _as_bytes(scheduler) for name, scheduler in self._by_name.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken; schedulers that are not made yet, as soon as they are."""
        self._saved = dict(saved)
        for name in self._by_name:
            self._restore(name)

    def _restore(self, name: str) -> None:
        data = self._saved.pop(name, None)
        if data is None:
            return
        scheduler = self._by_name[name]
        values = decode(bytes(data.tolist()))
        scheduler.load_state_dict(_in_kind(values["state"], scheduler.state_dict()))
        for group, moved in zip(scheduler.optimizer.param_groups, values["groups"], strict=True):
            group.update(moved)
        self._is_first = False


def _as_bytes(scheduler: LRScheduler) -> Tensor:
    groups = [{key: group[key] for key in _MOVED if key in group} for group in scheduler.optimizer.param_groups]
    data = encode({"state": _plain(scheduler.state_dict()), "groups": groups})
    return torch.tensor(list(data), dtype=torch.uint8, device="cpu")


def _plain(value: Any) -> Any:
    """Return a state with plain dictionaries, which are written down as they are."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _in_kind(value: Any, live: Any) -> Any:
    """Return a state with the kinds of dictionary that a scheduler has (`Counter`)."""
    if isinstance(value, dict) and isinstance(live, dict):
        same = {key: _in_kind(entry, live.get(key)) for key, entry in value.items()}
        return Counter(same) if isinstance(live, Counter) else same
    return value


def as_number(rate: Any) -> float | None:
    """Return a rate for people; None where that would wait for a device."""
    return float(rate) if not isinstance(rate, Tensor) or rate.device.type == "cpu" else None


def shown(rate: Any) -> str:
    return f"{float(rate):g}"


def lines(optimizer: torch.optim.Optimizer, schedulers: Schedulers, config: OptimSettings) -> list[str]:
    """Return what to tell of rates that are not the settings', and of the settings that have no effect on them."""
    groups = optimizer.param_groups
    changed = [name for name in _OF_SCHEDULE if getattr(config, name) != type(config).model_fields[name].default]
    if any(SCHEDULED in group for group in groups):
        return [f"learning rate: {_of_scheduler(groups, schedulers, config, changed)}"]
    own = [group[OWN_LR] for group in groups if OWN_LR in group]
    if own:
        return [f"learning rate: {_of_own_optimizer(own, config, changed)}"]
    made = optimizer.defaults.get("lr")
    if made is not None and not any(float(group["lr"]) == float(made) for group in groups) and "lr" in changed:
        return [
            f"learning rate: `lr` {shown(config.lr)}, which the optimizer's groups carry, not the {shown(made)} that "
            "the task makes it with"
        ]
    return []


def _of_scheduler(
    groups: Sequence[Mapping[str, Any]], schedulers: Schedulers, config: OptimSettings, changed: Sequence[str]
) -> str:
    kinds = ", ".join(schedulers.names) or "a torch scheduler that is not saved: see `paceline.StepsSchedulers`"
    is_base = any(float(group.get(SCHEDULED, -1.0)) == config.lr * group.get("lr_scale", 1.0) for group in groups)
    base = f" from `lr` {shown(config.lr)}" if is_base else ""
    idle = [name for name in changed if name != "lr" or not is_base]
    return f"set by the task's scheduler ({kinds}){base}{_without(idle)}"


def _of_own_optimizer(own: Sequence[Any], config: OptimSettings, changed: Sequence[str]) -> str:
    rates = ", ".join(dict.fromkeys(map(shown, own)))
    idle = [name for name in changed if name in ("lr", "scale_lr", "min_lr")]
    is_scaled = config.schedule != "constant" or config.warmup_steps or config.warmup_ratio
    how = ", which `schedule` and warm-up scale" if is_scaled else ""
    return f"{rates} of the task's own optimizer{how}{_without(idle)}"


def _without(idle: list[str]) -> str:
    if not idle:
        return ""
    names = " and ".join(f"`{name}`" for name in idle)
    return f"; {names} {'has' if len(idle) == 1 else 'have'} no effect"
