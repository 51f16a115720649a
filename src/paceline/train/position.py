"""Where a run is, and how a resumed one may differ from the one that began: pure decisions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError
from paceline.data.grain import Batch

NEWBOB_LOOKS_AT = ("val_every_steps", "val_every_epochs", "monitor", "monitor_mode")
"""Settings that change numerics where validation scores decide the learning rate."""
OVERLAP_LOOKS_AT = ("val_every_steps", "save_every_steps")
"""Settings that change numerics where an average is under way while steps go on: whoever looks waits for it."""


@dataclass
class Position:
    """The next step to do. (stage, epoch, step) finds the data, `num_steps` keys the randomness."""

    stage: int = 0
    epoch: int = 0
    step: int = 0
    """Within the epoch."""
    num_steps: int = 0
    """Since the run began."""
    stage_began: int = 0
    """`num_steps` when the stage began."""
    schedule_began: int = 0
    """`num_steps` when the schedule last started anew."""
    validated: int = -1
    """`num_steps` at the last validation, -1 before the first."""
    score: float | None = None
    """What the last validation gave for `monitor`."""
    best: float | None = None
    bad_validations: int = 0
    scores: list[float] = field(default_factory=list)
    """Monitored scores since the schedule began, lower is better."""
    is_complete: bool = False
    """The last stage has ended, `after_stage` included."""
    data: str | None = None
    """Fingerprint of the stage's data, once it has begun."""
    is_epoch_over: bool = False
    """Data of unknown length has ended with the last step."""

    def advance(self, batch: Batch) -> None:
        """Move past a batch that a step was done with."""
        self.step = batch.step + 1
        self.num_steps += 1

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.step, self.is_epoch_over = self.epoch + 1, 0, False

    def begin_stage(self, number: int) -> None:
        """Move to the start of another stage, whose scores are not compared with those before."""
        self.stage, self.epoch, self.step, self.is_epoch_over = number, 0, 0, False
        self.best, self.bad_validations = None, 0
        self.data = None

    @property
    def is_fresh(self) -> bool:
        """True if the last validation was of the weights as they are now."""
        return self.validated == self.num_steps

    @property
    def num_begun_stages(self) -> int:
        """Stages whose `before_stage` was called: a position at the end of a stage is of a model before the next."""
        return self.stage + (self.epoch > 0 or self.step > 0)

    def state(self) -> dict[str, Any]:
        """Return the fields as plain values, for a checkpoint."""
        return asdict(self)


class MoreRanksThanGrains(PacelineError):
    """Some ranks would never have anything to do."""

    def __init__(self, ranks: int, grains: int, is_resumed: bool) -> None:
        where = "this run was started with" if is_resumed else "the settings ask for"
        super().__init__(f"{ranks} ranks, but {where} {grains} grains per step: a rank takes whole grains")
        again = f"`--regrain` cuts the batch into {ranks} grains, which changes numerics"
        self.hint = f"use at most {grains} ranks, or {again if is_resumed else f'set `--grains {ranks}`'}"
        self.ranks = ranks
        self.grains = grains


class SettingsChanged(PacelineError):
    """A run is to be resumed with settings that change what is computed."""

    hint = "use the run's settings, or add `--allow-change` to go on with the new ones"

    def __init__(self, changes: dict[str, tuple[Any, Any]]) -> None:
        lines = [f"  {name}: {before!r} in the run, {now!r} now" for name, (before, now) in changes.items()]
        super().__init__("these settings differ from the run's and change the result:\n" + "\n".join(lines))
        self.changes = changes


def choose_grains(asked: int | None, stored: int | None, ranks: int, regrain: bool) -> int:
    """Grains per step: as the run began, else as asked, else one per rank."""
    grains = asked or stored or ranks
    if stored is not None and not regrain:
        grains = stored
    if ranks > grains:
        if not regrain:
            raise MoreRanksThanGrains(ranks, grains, is_resumed=stored is not None)
        grains = ranks
    return grains


def settings_changed(before: dict[str, Any], now: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that change numerics and differ: name -> (before, now)."""
    fields = type(now).model_fields
    current = now.model_dump(mode="json")
    defaults = {name: info.get_default(call_default_factory=True) for name, info in fields.items()}
    changes = {}
    for name, info in fields.items():
        extra = info.json_schema_extra
        is_free = isinstance(extra, dict) and extra.get("free")
        matters = now.schedule == "newbob" and name in NEWBOB_LOOKS_AT
        matters = matters or (now.reduce == "param" and now.sync_overlap > 0 and name in OVERLAP_LOOKS_AT)
        if is_free and not matters:
            continue
        if name in ("epochs", "steps") and now.schedule == "constant":
            continue  # how long to train changes nothing of what was trained
        if name == "grains" and (current[name] is None or now.regrain):
            continue  # not asked for: the run's own number is kept; asked for with `regrain`: allowed
        was = before.get(name, _plain(defaults[name]))  # a setting that the run's version did not know had its default
        if was != current[name]:
            changes[name] = (was, current[name])
    return changes


def _plain(value: Any) -> Any:
    """A default as JSON would give it back."""
    return list(value) if isinstance(value, tuple) else value
