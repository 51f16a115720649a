"""Knobs that `paceline tune` tries, from what is known of the machine, the task and the default's speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.config.settings import TrainConfig
from paceline.lab.tune.search import MARGIN, Changes, Knob, Speed

SETTINGS: dict[str, tuple[str, ...]] = {
    "level": ("level",),
    "compile": ("level", "compile_mode"),
    "grains": ("grains",),
    "workers": ("workers",),
    "order": ("order", "bins"),
    "threads": ("threads",),
}
"""The settings that each knob turns."""
MOST_WORKERS = 16
GPU_GAINS = {"level": 0.5, "compile": 0.4, "grains": 0.3, "threads": 0.0}
CPU_GAINS = {"level": 0.3, "threads": 0.2, "grains": 0.1, "compile": 0.05}
"""Rough share of time that a knob saves where it saves something; for the other knobs the default's measurement says
more. Compiling comes last on a CPU, where it takes longest."""


@dataclass(frozen=True)
class LevelFacts:
    """Description of a level on this device."""

    level: int
    computes: str
    """Equal for levels that compute alike."""
    compiles: bool


@dataclass(frozen=True)
class Facts:
    """Facts about a task on this machine before its first step."""

    device: Literal["cpu", "cuda"]
    device_name: str
    ranks: int
    cores: int
    threads: int
    """Of each rank."""
    grains: int
    levels: tuple[LevelFacts, ...]
    """The levels that this device has."""
    computes: str
    """Precision that the default computes in."""
    compiles: bool
    num_samples: int | None
    has_lengths: bool
    padding: float | None
    is_stream: bool
    memory_bytes: int = 0
    """Memory that a rank could have: that of its device, or its share of the machine's."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Facts:
        levels = tuple(LevelFacts(**level) for level in values["levels"])
        return cls(**{**values, "levels": levels})


def is_free(name: str) -> bool:
    """Return True if a setting leaves results as they are."""
    extra = TrainConfig.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("free"))


def knobs(
    facts: Facts, speed: Speed, config: TrainConfig, chosen: Sequence[str], *, keep_numerics: bool
) -> tuple[list[Knob], list[str]]:
    """Return the knobs to try, and a line with the reason for each knob that is left out."""
    gains = CPU_GAINS if facts.device == "cpu" else GPU_GAINS
    padding = facts.padding or 0.0
    wait = speed.data_share
    all_knobs = [
        Knob("level", _levels(facts), gains["level"]),
        Knob("compile", _compile(facts, config), gains["compile"]),
        Knob("grains", (_fewer(facts), tuple(finer(facts, config))), gains["grains"]),
        Knob("workers", _workers(facts, speed), wait),
        Knob("order", _orders(facts, config), padding),
        Knob("threads", _threads(facts), gains["threads"]),
    ]
    to_try, left_out = [], []
    for knob in all_knobs:
        knob = Knob(knob.name, tuple(path for path in knob.paths if path), knob.gain)
        if knob.name not in chosen or not knob.paths:
            continue
        if keep_numerics and not all(map(is_free, SETTINGS[knob.name])):
            left_out.append(f"{knob.name}: changes numerics")
        elif knob.name == "order" and padding < MARGIN:
            left_out.append(f"order: {100 * padding:.1f}% padding leaves nothing to win")
        elif knob.name == "workers" and wait < MARGIN and speed.workers == 0:
            left_out.append(f"workers: data is waited for {100 * wait:.1f}% of the time")
        else:
            to_try.append(knob)
    return to_try, left_out


def finer(facts: Facts, config: TrainConfig) -> list[Changes]:
    """Ever smaller grains: less memory."""
    if config.sync_batchnorm != "no":
        return []  # needs one grain per rank
    most = min(config.max_samples, 1 << 20, facts.num_samples or 1 << 20)
    if config.batch_cost is not None:
        most = 8 * facts.grains
    return [{"grains": facts.grains << power} for power in (1, 2, 3) if facts.grains << power <= most]


def _fewer(facts: Facts) -> tuple[Changes, ...]:
    """Larger grains: more memory, larger kernels."""
    halves = []
    grains = facts.grains
    while grains % 2 == 0 and grains // 2 >= facts.ranks:
        grains //= 2
        halves.append({"grains": grains})
    return tuple(halves)


def _levels(facts: Facts, *, compiling: bool = False) -> tuple[tuple[Changes, ...], ...]:
    """Each level that computes in another way than the default and than a lower level, with or without compiling."""
    first: dict[str, LevelFacts] = {}
    for level in sorted(facts.levels, key=lambda level: level.level):
        first.setdefault(level.computes, level)
    others = [level for level in first.values() if level.computes != facts.computes and level.compiles == compiling]
    return tuple(({"level": level.level},) for level in reversed(others))


def _compile(facts: Facts, config: TrainConfig) -> tuple[tuple[Changes, ...], ...]:
    """The levels that compile; where one is faster, or the default compiles, also the compiler's other mode."""
    mode = {"compile_mode": "max-autotune" if config.compile_mode == "default" else "default"}
    paths: list[tuple[Changes, ...]] = [(level, {**level, **mode}) for (level,) in _levels(facts, compiling=True)]
    return (*paths, (mode,)) if facts.compiles else tuple(paths)


def _workers(facts: Facts, speed: Speed) -> tuple[tuple[Changes, ...], ...]:
    if facts.is_stream:
        return ()  # read by the training process itself
    now = speed.workers
    up = [count for count in (1, 2, 4, 8, MOST_WORKERS) if now < count <= 2 * max(1, facts.cores // facts.ranks)]
    down = [count for count in (8, 4, 2, 1, 0) if count < now]
    return tuple({"workers": count} for count in up), tuple({"workers": count} for count in down)


def _orders(facts: Facts, config: TrainConfig) -> tuple[tuple[Changes, ...], ...]:
    """Batches of alike lengths. `sorted` and `laplace` begin with short samples: a glance says nothing of them."""
    if not facts.has_lengths or facts.is_stream:
        return ()
    if config.order != "bucket":
        return (({"order": "bucket"},),)
    bins = config.bins or 16
    most = math.inf if facts.num_samples is None else facts.num_samples / max(1, config.max_samples)
    finer_bins: list[Changes] = [{"bins": bins * factor} for factor in (2, 4) if bins * factor <= most]
    return (tuple(finer_bins),)


def _threads(facts: Facts) -> tuple[tuple[Changes, ...], ...]:
    if facts.device != "cpu":
        return ()
    share = max(1, facts.cores // facts.ranks)
    down = [facts.threads >> power for power in (1, 2, 3) if facts.threads >> power >= 1]
    up = [share] if facts.threads < share else []
    return tuple({"threads": count} for count in up), tuple({"threads": count} for count in down)
