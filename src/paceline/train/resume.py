"""Decide how a start continues what is on disk: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from paceline.config.settings import DataSettings, TrainConfig
from paceline.core.errors import PacelineError
from paceline.core.plugins import Plugin, changes
from paceline.core.run_folder import RunRecord
from paceline.core.secrets import masked_values
from paceline.core.together import Exclusion
from paceline.core.units import counted
from paceline.data.partition import MIN_GRAIN, most_grains
from paceline.train.scaling import for_ranks
from paceline.world.discover.environment import World

NEWBOB_DEPENDS_ON = ("val_every_steps", "val_every_epochs", "monitor", "monitor_mode")
"""Settings that change numerics where validation scores decide the learning rate."""
OVERLAP_DEPENDS_ON = ("val_every_steps", "save_every_steps")
"""Settings that change numerics where an average runs while steps go on: validation and saving wait for it."""


@dataclass(frozen=True)
class Stored:
    """What a start found on disk."""

    own: RunRecord | None = None
    """Record of the run in the run folder."""
    other: RunRecord | None = None
    """Record of another run, whose checkpoint `resume` names."""
    checkpoint: dict[str, Any] | None = None
    """State of the checkpoint that `resume` names, where no run with a record is around it."""

    @property
    def record(self) -> RunRecord | None:
        """Record of the run to resume, None for a new run."""
        return self.own or self.other


@dataclass(frozen=True)
class Resume:
    """How a start continues: everything that the disk, the settings and the ranks decide together, before any object is
    built from it."""

    config: TrainConfig
    """Effective settings: global batch and learning rate for this number of ranks, and the order of sums."""
    arithmetic: str
    """How batch and learning rate follow from the number of ranks, for the console; empty where they do not."""
    grains: int
    """Grains per step."""
    source: Path | Literal["newest"] | None
    """Checkpoint to resume from: a path, the newest sound one of the run folder, or none."""
    starts: tuple[dict[str, Any], ...]
    """Starts that the record in the run folder has, see provenance.py."""
    choice: dict[str, Any] | None
    """Choice of the autotuner in the record, which stays there until the autotuner runs."""
    is_in_pieces: bool
    """True if several ranks write their pieces of one checkpoint."""
    replicas: tuple[tuple[int, ...], ...]
    """Ranks that have a whole model together: all, or with `shard: node` those of each machine."""
    remarks: tuple[str, ...]
    """What is different from the stored run, for the console."""
    facts: dict[str, Any]
    """What all ranks must have found or decided alike: a folder on a local disk is found by one machine only."""

    @property
    def writers(self) -> tuple[int, ...]:
        """Ranks that write checkpoints: the first one, or those that have a whole model together."""
        return self.replicas[0] if self.is_in_pieces else (0,)

    def place(self, rank: int) -> tuple[int, int]:
        """Return which pieces a rank has: its index in its replica of the model, and the size of the replica."""
        replica = next(ranks for ranks in self.replicas if rank in ranks)
        return replica.index(rank), len(replica)

    def check_ranks(self, before: int, now: int) -> None:
        """Raise `SettingsChanged` for another number of ranks than the checkpoint's, where it decides the data."""
        # With `random_seed_offset` the ranks themselves decide which sample comes when.
        if before != now and self.config.dataset_distribution != "shard" and not self.config.allow_change:
            raise SettingsChanged({"ranks (with random_seed_offset)": (before, now)})

    def check_precision(self, before: str | None, now: str) -> None:
        """Raise `SettingsChanged` for another precision: `level: auto` may have another meaning on another device."""
        if before not in (None, now) and not self.config.allow_change:
            raise SettingsChanged({"precision on this device": (before, now)})


def decide(
    stored: Stored,
    config: TrainConfig,
    world: World,
    *,
    machines: Sequence[Sequence[int]] | None = None,
    plugins: Sequence[Plugin] = (),
) -> Resume:
    """Decide how a start with these settings continues what is stored.

    `machines` are the ranks of each machine, None where there is no process group. Raises `SettingsChanged`,
    `MoreRanksThanGrains` or `FewerSamplesThanRanks`.
    """
    config, arithmetic = for_ranks(config, world.size)
    record = stored.record
    if record is None:
        check_batch(config, world.size)
    elif not config.allow_change:
        changed = settings_changed({**record.settings, "grains": record.grains}, config)
        if changed:
            raise SettingsChanged(changed)
    before = None if record is None else record.grains
    may_regrain = config.regrain or (config.allow_change and config.grains is not None)
    grains = choose_grains(config.grains, before, world.size, may_regrain)
    replicas = machines if machines is not None and config.shard == "node" else [range(world.size)]
    may_choose = stored.own is not None and config.level in ("auto", 4)
    newest: Literal["newest"] | None = None if record is None or config.resume == "no" else "newest"
    return Resume(
        config=_with_sums(config, stored),
        arithmetic=arithmetic,
        grains=grains,
        source=config.resume if isinstance(config.resume, Path) else newest,
        starts=() if stored.own is None else tuple(stored.own.starts),
        choice=stored.own.choice if stored.own is not None and may_choose else None,
        is_in_pieces=machines is not None and config.shard != "none" and config.checkpoint_form == "sharded",
        replicas=tuple(map(tuple, replicas)),
        remarks=tuple(_remarks(record, grains, plugins)),
        facts=_facts(record, config, grains, plugins),
    )


def _with_sums(config: TrainConfig, stored: Stored) -> TrainConfig:
    """Return settings with the order of sums: as asked, else as the run began (fast before there was a choice), else
    exact."""
    if config.sums is not None:
        return config
    began = stored.checkpoint if stored.record is None else stored.record.settings
    effective = config.model_copy(update={"sums": "exact" if began is None else began.get("sums") or "fast"})
    effective.model_fields_set.discard("sums")  # not asked for, so no setting without effect
    return effective


def _remarks(record: RunRecord | None, grains: int, plugins: Sequence[Plugin]) -> list[str]:
    """Return what is not as it was when the stored run was begun, or ended."""
    if record is None:
        return []
    lines = changes(record.plugins, plugins)
    if record.status == "diverged":
        lines.append(
            "this run had diverged: it goes on from what it saved before, if anything; the same settings diverge "
            "again, others need `--allow-change`"
        )
    if record.grains not in (None, grains):
        lines.append(f"{counted(grains, 'grain')} instead of {record.grains}: numerics change from here on")
    return lines


def _facts(record: RunRecord | None, config: TrainConfig, grains: int, plugins: Sequence[Plugin]) -> dict[str, Any]:
    found = "none"
    if record is not None:
        found = f"one with {counted(record.grains or 0, 'grain')}, {counted(len(record.starts), 'start')} so far"
    versions = {plugin.title.partition(" of ")[0]: plugin.origin for plugin in plugins}
    return {f"run to resume in {config.out}": found, "grains": grains, **versions}


class MoreRanksThanGrains(PacelineError):
    """More ranks than grains: some would never have anything to do."""

    ranks: int
    grains: int
    is_resumed: bool
    sentence = "{ranks:#rank}, but {source} {grains:#grain} per step: a rank takes whole grains"
    hint = "use at most {grains:#rank}, or {remedy}"

    @property
    def source(self) -> str:
        return "this run was started with" if self.is_resumed else "the settings ask for"

    @property
    def remedy(self) -> str:
        if self.is_resumed:
            return f"`--regrain` cuts the batch into {self.ranks} grains, which changes numerics"
        return f"set `--grains {self.ranks}`"


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
    """Settings of a resumed run that change what is computed."""

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
        line = "  {name}: {before!r} in the run, {now!r} now"
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
