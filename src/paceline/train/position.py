"""Position of a run, and how a resumed one may differ from the one that began: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic.fields import FieldInfo

from paceline.config.settings import DataSettings, TrainConfig
from paceline.core.errors import PacelineError
from paceline.core.language import said
from paceline.core.secrets import masked_values
from paceline.core.together import Exclusion
from paceline.data.grain import Batch
from paceline.data.partition import MIN_GRAIN, most_grains

NEWBOB_DEPENDS_ON = ("val_every_steps", "val_every_epochs", "monitor", "monitor_mode")
"""Settings that change numerics where validation scores decide the learning rate."""
OVERLAP_DEPENDS_ON = ("val_every_steps", "save_every_steps")
"""Settings that change numerics where an average runs while steps go on: validation and saving wait for it."""


@dataclass(frozen=True)
class Position:
    """The next step to do. (stage, epoch, step) finds the data, `num_steps` keys the randomness.

    It is a value: training holds the current one and replaces it.
    """

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
    """Value of `monitor` at the last validation."""
    best: float | None = None
    bad_validations: int = 0
    scores: tuple[float, ...] = ()
    """Monitored scores since the schedule began, lower is better."""
    is_complete: bool = False
    """The last stage has ended, `after_stage` included."""
    data: str | None = None
    """Fingerprint of the stage's data, once it has begun."""
    first_loss: float | None = None
    """Largest loss, by its size, of the first step of a stage: divergence is judged by it."""
    is_epoch_over: bool = False
    """Data of unknown length has ended with the last step."""
    save_every: int | None = None
    """Steps between checkpoints that `save_every_steps: auto` has chosen."""

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Position:
        """Return the position that `state` was taken of."""
        return cls(**{**state, "scores": tuple(state.get("scores", ()))})

    def advance(self, batch: Batch) -> Position:
        """Return the position after a batch that was trained on."""
        moved = object.__new__(Position)  # `replace`, which runs all of __init__, takes ten times as long
        moved.__dict__.update(self.__dict__, step=batch.step + 1, num_steps=self.num_steps + 1)
        return moved

    def end_epoch(self) -> Position:
        """Return the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, step=0, is_epoch_over=False)

    def enter_stage(self, number: int) -> Position:
        """Return the start of another stage, whose scores are not compared with those before."""
        fresh: dict[str, Any] = {"best": None, "bad_validations": 0, "data": None}
        return replace(self, stage=number, epoch=0, step=0, is_epoch_over=False, **fresh)

    def begin_stage(self, *, restarts_schedule: bool) -> Position:
        """Return the position with its stage begun at this step, and the schedule as well if it restarts."""
        began = replace(self, stage_began=self.num_steps)
        return replace(began, schedule_began=self.num_steps, scores=()) if restarts_schedule else began

    @property
    def is_fresh(self) -> bool:
        """True if the last validation was of the weights as they are now."""
        return self.validated == self.num_steps

    @property
    def num_begun_stages(self) -> int:
        """Stages whose `before_stage` was called: a position at the end of a stage is of a model before the next."""
        return self.stage + (self.epoch > 0 or self.step > 0)

    def state(self) -> dict[str, Any]:
        """Return the fields as plain values, for a checkpoint; `save_every` only if it was chosen: older versions do
        not know it."""
        values = {**asdict(self), "scores": list(self.scores)}
        return {name: value for name, value in values.items() if name != "save_every" or value is not None}


class MoreRanksThanGrains(PacelineError):
    """More ranks than grains: some would never have anything to do."""

    ranks: int
    grains: int
    is_resumed: bool
    sentence = "{ranks:#rank}, but {source} {grains:#grain} per step: a rank takes whole grains"
    hint = "use at most {grains:#rank}, or {remedy}"

    @property
    def source(self) -> str:
        return said("this run was started with") if self.is_resumed else said("the settings ask for")

    @property
    def remedy(self) -> str:
        if self.is_resumed:
            return said("`--regrain` cuts the batch into {ranks} grains, which changes numerics").format(
                ranks=self.ranks
            )
        return said("set `--grains {ranks}`").format(ranks=self.ranks)


class FewerSamplesThanRanks(PacelineError):
    """A batch that cannot give every rank a sample."""

    ranks: int
    samples: int
    sentence = "{ranks:#rank} for a batch of {samples:#sample}: {idle:#rank} would have nothing to do"
    hint = (
        "start at most {most:#rank}, or set `--global-batch {enough}` or more: "
        f"a rank computes on {MIN_GRAIN} samples at least (batch norm has no variance over one)"
    )

    @property
    def most(self) -> int:
        return most_grains(self.samples, self.ranks)

    @property
    def idle(self) -> int:
        return self.ranks - self.most

    @property
    def enough(self) -> int:
        return MIN_GRAIN * self.ranks


class SettingsChanged(PacelineError):
    """A resume with settings that change what is computed."""

    changes: dict[str, tuple[Any, Any]]
    excludes = (
        Exclusion(
            "`--batch-per-device`",
            "`--resume` on another number of ranks",
            "mathematics",
            "The global batch, and with `--scale-lr` the learning rate, would be others from there on; "
            "`--allow-change` goes on with them.",
        ),
    )
    sentence = "these settings differ from the run's and change the result:\n{lines}"
    hint = "use the run's settings, or add `--allow-change` to go on with the new ones"

    @property
    def lines(self) -> str:
        line = said("  {name}: {before!r} in the run, {now!r} now")
        return "\n".join(line.format(name=name, before=old, now=new) for name, (old, new) in self.changes.items())


def choose_grains(asked: int | None, stored: int | None, ranks: int, regrain: bool) -> int:
    """Return the grains per step: as the run began, else as asked, else one per rank."""
    grains = asked or stored or ranks
    if stored is not None and not regrain:
        grains = stored
    if ranks > grains:
        if not regrain:
            raise MoreRanksThanGrains(ranks, grains, is_resumed=stored is not None)
        grains = ranks
    return grains


def check_batch(config: DataSettings, ranks: int) -> None:
    """Raise `FewerSamplesThanRanks` for a batch of fewer samples than ranks, where ranks share one."""
    is_shared = config.dataset_distribution == "shard" and config.batch_per_device is None
    smallest = min([config.max_samples, *(int(point.value or 0) for point in config.batch_points)])
    if is_shared and config.batch_cost is None and smallest < ranks:
        raise FewerSamplesThanRanks(ranks, smallest)


def settings_changed(before: dict[str, Any], now: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that change numerics and differ: name -> (before, now)."""
    before, current = masked_values(before), masked_values(now.model_dump(mode="json"))  # a record has no secrets
    changes = {}
    for name, info in type(now).model_fields.items():
        if not _changes_numerics(name, info, now):
            continue
        # A setting that the run's version did not know had its default.
        # (sums had one order only since there is a choice).
        if name == "sums":
            before = {**before, "sums": before.get("sums") or "fast"}
        value = before.get(name, _as_json(info.get_default(call_default_factory=True)))
        if value != current[name]:
            changes[name] = (value, current[name])
    return changes


def _changes_numerics(name: str, info: FieldInfo, now: TrainConfig) -> bool:
    """Return True if a run gives another result with another value of this setting."""
    if name in ("epochs", "steps"):
        return now.schedule != "constant"  # else the number of steps changes nothing of those that were done
    if name == "grains":
        return now.grains is not None and not now.regrain  # else the run's number is kept, or a new one is allowed
    if name == "sums":
        return now.sums is not None  # else the run goes on as it began
    if now.schedule == "newbob" and name in NEWBOB_DEPENDS_ON:
        return True
    if now.reduce == "param" and now.sync_overlap > 0 and name in OVERLAP_DEPENDS_ON:
        return True
    extra = info.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("free"))


def _as_json(value: Any) -> Any:
    """Return a default as JSON would give it back."""
    return list(value) if isinstance(value, tuple) else value
