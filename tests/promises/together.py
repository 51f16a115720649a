"""Features of a training run, two at a time: what each sets, and the losses that a pair must come to.

A feature that changes no numbers leaves the losses of the other one as they are; one that changes them comes to the
same losses on every number of ranks, unless its meaning depends on that number.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from paceline.core.errors import PacelineError
from paceline.data.grain import Grain
from paceline.observe.journal import read
from paceline.speed import precision
from paceline.speed.precision import Capabilities
from paceline.train import loop
from paceline.train.find_task import find_task
from paceline.train.run import Run, open_run
from paceline.train.task import HasLengths, HasStages, Stage, Task
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.sharded import NUM_SAMPLES, WIDTH, Net, Norm, points

STOP_AFTER = 3
"""Steps of the first launch of a run that is resumed."""


@dataclass(frozen=True)
class Feature:
    """One setting, or a few that belong together."""

    settings: Mapping[str, Any]
    numbers: Literal["same", "other", "by ranks"] = "same"
    """Losses: those of the run without it, others, or others on each number of ranks."""
    digits: float = 1e-4
    """Relative difference that its losses may have from those of the same computation in another order."""
    task: str = ""
    """Another task than the usual one: `stream`, `stages` or `replay`."""
    launches: Literal["one", "two", "elsewhere"] = "one"
    """`two`: stopped and resumed. `elsewhere`: begun on another number of ranks."""


PARAM = {"reduce": "param", "sync_step": 2}
FEATURES: dict[str, Feature] = {
    "-O1": Feature({"level": 1}),
    "-O2": Feature({"level": 2}, "other", 0.05),
    "-O3": Feature({"level": 3}, "other", 0.05),
    "-O4": Feature({"level": 4}),
    "fp64": Feature({"precision": "fp64"}, "other", 1e-9),
    "fp16": Feature({"precision": "fp16"}, "other", 0.05),
    "fp16-master": Feature({"precision": "fp16-master"}, "other", 0.05),
    "fp16-pure": Feature({"precision": "fp16-pure", "optimizer": "sgd"}, "other", 0.1),
    "logmax": Feature({"loss_scale": "logmax"}),
    "constant scale": Feature({"loss_scale": 8.0}),
    "averaging": Feature(PARAM, "by ranks"),
    "DiLoCo": Feature(PARAM | {"outer": "nesterov"}, "by ranks"),
    "overlap": Feature(PARAM | {"sync_overlap": 1}, "by ranks"),
    "own states": Feature(PARAM | {"sync_state": "keep"}, "by ranks"),
    "wire bf16": Feature({"wire": "bf16"}, "by ranks", 0.05),
    "wire fp16": Feature({"wire": "fp16"}, "by ranks", 0.05),
    "wire int8": Feature({"wire": "int8"}, "by ranks", 0.05),
    "shards": Feature({"shard": "full"}),
    "shards in pieces": Feature({"shard": "full", "checkpoint_form": "sharded"}),
    "shards of a machine": Feature({"shard": "node"}),
    "joined norms": Feature({"sync_batchnorm": "all", "grains": 2}, "by ranks"),
    "two grains": Feature({"grains": 2}, "other"),
    "ema": Feature({"ema": 0.9}),
    "clip norm": Feature({"clip_norm": 0.3}, "other"),
    "clip value": Feature({"clip_value": 0.01}, "other"),
    "larc": Feature({"larc": "clip"}, "other"),
    "sgd": Feature({"optimizer": "sgd"}, "other"),
    "novograd": Feature({"optimizer": "novograd"}, "other"),
    "lamb": Feature({"optimizer": "lamb"}, "other"),
    "muon": Feature({"optimizer": "muon"}, "other"),
    "lars": Feature({"optimizer": "lars"}, "other"),
    "cosine": Feature({"schedule": "cosine", "warmup_ratio": 0.3}, "other"),
    "newbob": Feature({"schedule": "newbob", "warmup_steps": 2, "val_every_steps": 2}, "other"),
    "groups": Feature({"groups": [{"match": "*.bias", "lr_scale": 0.1}], "weight_decay": 0.3}, "other"),
    "freeze": Feature({"freeze": ("body.*",)}, "other"),
    "recompute": Feature({"checkpoint_activations": ("blocks.*",)}),
    "workers": Feature({"workers": 1}),
    "packed": Feature({"train_files": "PACKED"}),
    "stream": Feature({}, "other", task="stream"),
    "stages": Feature({}, "other", task="stages"),
    "replay": Feature({}, "other", task="replay"),
    "buckets": Feature({"order": "bucket", "bins": 3}, "other"),
    "batch by cost": Feature({"batch_cost": 60.0, "global_batch": None}, "other"),
    "batch schedule": Feature({"batch_schedule": ("8@2", "24@4")}, "other"),
    "length schedule": Feature({"length_schedule": ("5@0", "none@3")}, "other"),
    "sub-epochs": Feature({"partition_epoch": 2}, "other"),
    "own orders": Feature({"dataset_distribution": "random_seed_offset"}, "by ranks"),
    "batch per rank": Feature({"batch_per_device": 8, "global_batch": None, "scale_lr": "linear"}, "by ranks"),
    "validation": Feature({"val_every_steps": 2, "val_every_epochs": None, "eval_batch": 4, "monitor_mode": "max"}),
    "train only": Feature({"validation": False}),
    "saves": Feature({"save_every_steps": 2, "keep_last": 1, "keep_best": 2}),
    "timeline": Feature({"profile": "1:3"}),
    "resume": Feature({}, launches="two"),
    "resume elsewhere": Feature({}, launches="elsewhere"),
}
SCORING = {"ema", "validation"}
"""They leave losses as they are, but not the scores of a validation, which `newbob` follows."""
SLOW = {"-O3"}
"""Seconds of compiling in every process: left out of the sample; test_sharding.py compiles in CI."""
COMMON: dict[str, Any] = {
    "steps": 6,
    "global_batch": 16,
    "grains": 4,
    "optimizer": "adamw",
    "lr": 0.02,
    "level": 0,
    "workers": 0,
    "loggers": (),
    "log_every": 1,
    "progress": "none",
    "device": "cpu",
    "shard_modules": ("blocks.*",),
}


# -- what is trained ---------------------------------------------------------------------------------------------------


class PairTask(Task, HasLengths):
    """Blocks with batch norm on points that have lengths; stops itself where a run is to be resumed."""

    stops = False
    trainer: Run

    def model(self) -> nn.Module:
        return Net(has_norm=True)

    def train_data(self) -> Any:
        return points(NUM_SAMPLES, seed=1)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": points(11, seed=2)}

    def lengths(self, data: Any) -> Any:
        return np.arange(len(data)) % 7 + 1.0 if hasattr(data, "__len__") else None

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        error = model(grain.x.to(next(model.parameters()).dtype)).double() - grain.y.double()
        return error.square().sum(), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
        return {"loss": self.loss(model, grain)}

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        if self.stops and step.number + 1 == STOP_AFTER:
            self.trainer.ask_to_stop()


class Walk(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([points(NUM_SAMPLES, seed=3)[index] for index in range(NUM_SAMPLES)])


class StreamTask(PairTask):
    def train_data(self) -> Any:
        return Walk()


class StagesTask(PairTask, HasStages):
    def stages(self) -> list[Stage]:
        return [Stage("one", points(NUM_SAMPLES, seed=1)), Stage("two", points(24, seed=4), restart_optimizer=True)]


class Picture(nn.Module):
    """The blocks, for pictures."""

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(int(np.prod(shape)), WIDTH)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm(WIDTH), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def task_class(kind: str) -> type[Any]:
    if kind != "replay":
        return {"": PairTask, "stream": StreamTask, "stages": StagesTask}[kind]
    continual = find_task("continual")

    class ReplayTask(continual):  # type: ignore[misc, valid-type]
        stops, after_step = False, PairTask.after_step

    return ReplayTask


REPLAY = {
    "dataset": "seq-digits",
    "num_tasks": 2,
    "buffer_size": 40,
    "minibatch_size": 10,
    "backbone": f"{__file__}:Picture",
}


# -- how it is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Losses of a run, or how it was refused."""

    losses: list[float] = field(default_factory=list)
    error: str = ""
    message: str = ""
    is_declared: bool = False
    """The refusal is an entry of docs/together.md."""


def settings_of(names: tuple[str, ...], packed: Path) -> dict[str, Any]:
    settings = dict(COMMON)
    for name in names:
        settings |= FEATURES[name].settings
    if settings.get("train_files") == "PACKED":
        settings["train_files"] = (packed,)
    return settings


def kind_of(names: tuple[str, ...]) -> str:
    return next((FEATURES[name].task for name in names if FEATURES[name].task), "")


def refusals(names: tuple[str, ...], packed: Path) -> list[str]:
    """Lines of the settings' own declarations that refuse these features."""
    kind = task_class(kind_of(names)).Settings
    given = settings_of(names, packed) | (REPLAY if kind_of(names) == "replay" else {})
    settings = kind.model_construct(**given)
    return [each.describe(settings) for each in settings.excluded()]


def launch(link: Link, names: tuple[str, ...], packed: str, folder: str, resume: str, stops: bool) -> Outcome:
    """Train on these ranks; the first returns the losses."""
    kind = kind_of(names)
    made = task_class(kind)()
    made.stops = stops
    given = settings_of(names, Path(packed)) | {"out": Path(folder), "resume": resume}
    given |= REPLAY if kind == "replay" else {}
    device = Capabilities("cpu", "a CPU", bf16="-O4" not in names, tf32=False, fp16=True, compiler="-O3" in names)
    compiler = torch.compile
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        if "-O3" in names:
            warnings.simplefilter("ignore")  # torch's compiler warns of its own deprecated parts
        patch.setattr(precision, "capabilities", lambda _: device)
        patch.setattr(torch, "compile", lambda call, **_: compiler(call, backend="eager"))
        patch.setenv("XDG_CACHE_HOME", f"{folder}-cache")
        try:
            config = type(made).Settings.model_validate(given)
        except ValidationError as error:
            lines = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            return Outcome(error="settings", message=lines)
        try:
            made.trainer = open_run(made, config, link)
            loop.train(made.trainer)
        except PacelineError as error:
            return Outcome([], type(error).__name__, str(error), bool(error.excludes))
    if not link.is_first:
        return Outcome()
    return Outcome([row["loss"] for row in read(Path(folder) / "metrics.jsonl") if "loss" in row and "step" in row])


def train(names: tuple[str, ...], size: int, packed: Path, folder: Path) -> Outcome:
    """Train with these features on so many ranks, in as many launches as they ask for."""
    launches = {FEATURES[name].launches for name in names} - {"one"}
    sizes = [size]
    if launches:
        sizes = [size if launches == {"two"} else 3 - size, size]
    outcome = Outcome()
    for number, ranks in enumerate(sizes):
        is_last = number == len(sizes) - 1
        args = names, str(packed), str(folder), "auto" if number else "no", not is_last
        outcome = run_ranks(ranks, launch, *args)[0]
        if outcome.error:
            break
    return outcome


# -- which pairs, and what they must come to ---------------------------------------------------------------------------


def pairs() -> list[tuple[str, str]]:
    """Return all pairs of features that can be asked for at once: both may not set one thing to two values."""
    return [pair for pair in itertools.combinations(FEATURES, 2) if not _collide(*map(FEATURES.get, pair))]  # type: ignore[arg-type]


def _collide(first: Feature, second: Feature) -> bool:
    shared = first.settings.keys() & second.settings.keys()
    if any(first.settings[name] != second.settings[name] for name in shared):
        return True
    is_data = [bool(each.task) or "train_files" in each.settings for each in (first, second)]
    has_launches = [each.launches != "one" for each in (first, second)]
    return (all(is_data) and {first.task, second.task} != {"stages", ""}) or all(has_launches)


def sample(seed: int) -> list[tuple[str, str]]:
    """Return pairs of a random order of the features, so that each of them is there once or more."""
    generator, known = random.Random(seed), [pair for pair in pairs() if not SLOW & {*pair}]
    names, chosen = [name for name in FEATURES if name not in SLOW], []
    generator.shuffle(names)
    while names:
        first = names.pop()
        partners = [pair for pair in known if first in pair]
        unused = [pair for pair in partners if not {*pair} - {first, *names}]
        chosen.append(generator.choice(unused or partners))
        names = [name for name in names if name not in chosen[-1]]
    return chosen


def reference_of(names: tuple[str, ...], size: int) -> tuple[tuple[str, ...], int] | None:
    """Return the (features, ranks) whose losses a run must have; None where there is no other run to compare with."""
    by_scores = SCORING if "newbob" in names else set()
    changing = tuple(name for name in names if FEATURES[name].numbers != "same" or name in by_scores)
    by_ranks = any(FEATURES[name].numbers == "by ranks" for name in changing)
    is_moved = any(FEATURES[name].launches == "elsewhere" for name in names)
    reference = changing, size if by_ranks else 1
    return None if reference == (names, size) or (by_ranks and is_moved) else reference


def digits_of(names: tuple[str, ...]) -> float:
    digits = [FEATURES[name].digits for name in names]
    return max(digits) if max(digits) > 1e-4 else min(digits)
