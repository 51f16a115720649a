"""Settings of the continual recipe, on top of those of every run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from paceline.config.problems import nearest
from paceline.config.settings import (
    Fraction,
    OptimizerName,
    Positive,
    PositiveFloat,
    Section,
    TrainConfig,
    free,
    per_rank,
)
from paceline.core.together import SettingsExclusion
from paceline.recipes.continual.methods import METHODS, OTHER_NAMES

STREAM_NAMES = ("seq-digits", "seq-mnist", "perm-mnist", "rot-mnist", "seq-cifar10", "seq-cifar100")
BACKBONE_NAMES = ("mlp", "resnet18")
BEST = Path(__file__).with_name("best.yaml")
_IN_FILE = re.compile(r".+\.py:\w+$")


class ContinualData(Section):
    """What comes, in which parts."""

    dataset: str = "seq-digits"
    """Stream: seq-digits (comes with scikit-learn), seq-mnist, perm-mnist, rot-mnist, seq-cifar10 or seq-cifar100."""
    data_root: Path = per_rank(Path("data"))
    """Where the official files are; checksums are verified, nothing is downloaded."""
    num_tasks: Positive | None = None
    """Parts of the stream; 5 (seq-cifar100: 10, perm-mnist and rot-mnist: 20) if not set."""
    scenario: Literal["class", "task", "domain"] | None = None
    """`class`: choose among all classes; `task`: among those of the example's task, in training too. The stream's own
    if not set."""
    permute_classes: bool = False
    """Classes come in an order drawn from `seed` instead of ascending."""


class ContinualMethod(Section):
    """How forgetting is fought."""

    method: str = "er"
    """finetune, joint, er, er_ace, der, derpp (der++), agem, lwf, ewc_on, gdumb, or a class of your own as
    path/to/file.py:Name."""
    backbone: str | None = None
    """mlp, resnet18, or path/to/file.py:Model, made as Model(shape, num_classes); the stream's own if not set."""
    buffer_size: Positive = 200
    """Items in the replay buffer."""
    minibatch_size: Positive | None = None
    """Items replayed per step and draw, over all ranks; as many as `global_batch` if not set."""
    strategy: Literal["reservoir", "class-balanced", "loss-aware", "herding"] = "reservoir"
    """Which items the buffer keeps."""
    buffer_mode: Literal["replicated", "sharded"] = free("replicated")
    """`replicated`: every rank holds the whole buffer; `sharded`: its share of it. The results are the same."""
    check_every: Positive | None = free(100)
    """Steps between comparisons of the ranks' buffers."""
    alpha: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the kept outputs (der, derpp) or of the old network's (lwf)."""
    beta: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the kept labels (derpp)."""
    e_lambda: Annotated[float, Field(ge=0)] = 90.0
    """Pull towards the weights of earlier tasks (ewc_on)."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the earlier tasks' importance that is kept (ewc_on)."""
    temperature: PositiveFloat = 2.0
    """Softening of the outputs (lwf)."""
    fitting_epochs: Positive = 250
    """Epochs on what was kept, after each task (gdumb)."""
    best_args: bool = False
    """Take the best known values for this stream, method and buffer size where nothing else is set."""


class ContinualSettings(TrainConfig, ContinualMethod, ContinualData):
    """Training on a stream of tasks."""

    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "the recipe `continual`",
            "`--train-files`, `--val-files`",
            "one thing twice",
            "Its data is that of `--dataset`, which comes in tasks.",
            "`train_files` and `val_files` have no meaning here: set `dataset`, which comes in tasks",
            lambda s: bool(s.train_files or s.val_files),
        ),
        SettingsExclusion(
            "the recipe `continual`",
            "`--dataset-distribution random_seed_offset`",
            "mathematics",
            "A stream has one order, which all ranks share: what the buffer holds depends on it.",
            "`dataset_distribution` must be shard: a stream has one order, which all ranks share",
            lambda s: s.dataset_distribution != "shard",
        ),
        SettingsExclusion(
            "the recipe `continual`",
            "`--batch-cost`",
            "mathematics",
            "Pictures have no lengths.",
            "`batch_cost` has no meaning here: pictures have no lengths; set `global_batch`",
            lambda s: s.batch_cost is not None,
        ),
        SettingsExclusion(
            "the recipe `continual`",
            "`-O4`",
            "mathematics",
            "`-O4` times steps on copies of the model before the first one; here a step draws from a buffer that steps "
            "fill, so that a timed step would not be one of the run's.",
            "`level` 4 would time steps before the buffer has anything to draw: use level 0 to 3",
            lambda s: s.level == 4,
        ),
    )

    global_batch: Positive | None = 10
    epochs: Positive | None = 1
    optimizer: OptimizerName = "sgd"
    momentum: Fraction = 0.0
    lr: PositiveFloat = 0.03
    level: Literal["auto", 0, 1, 2, 3, 4] = 0
    eval_batch: Positive | None = 256
    val_every_epochs: Positive | None = free(None)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_best(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("best_args") not in (True, "true"):
            return given
        method = OTHER_NAMES.get(given.get("method", "er"), given.get("method", "er"))
        dataset = given.get("dataset", "seq-digits")
        size = given.get("buffer_size")
        found = best_arguments(str(dataset), str(method), None if size is None else int(size))
        return {**found, **given}

    @field_validator("dataset")
    @classmethod
    def _known_stream(cls, name: str) -> str:
        return _known(name, "stream", STREAM_NAMES, STREAM_NAMES)

    @field_validator("method")
    @classmethod
    def _known_method(cls, name: str) -> str:
        name = OTHER_NAMES.get(name, name)
        return name if _IN_FILE.match(name) else _known(name, "method", METHODS, [*METHODS, *OTHER_NAMES])

    @field_validator("backbone")
    @classmethod
    def _known_backbone(cls, name: str | None) -> str | None:
        if name is None or _IN_FILE.match(name):
            return name
        return _known(name, "network", BACKBONE_NAMES, BACKBONE_NAMES)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.replay_size > self.buffer_size and self.method not in ("finetune", "joint", "lwf", "ewc_on", "gdumb"):
            which = "" if self.minibatch_size else ": as many as `global_batch`, because `minibatch_size` is not set"
            yield f"`buffer_size` is {self.buffer_size}, smaller than a replay batch of {self.replay_size}{which}"

    @property
    def replay_size(self) -> int:
        """Items of one draw."""
        return self.minibatch_size or self.max_samples


def best_arguments(dataset: str, method: str, buffer_size: int | None) -> dict[str, Any]:
    """The best known settings, those for this buffer size or for the one nearest to it; nothing if none are known."""
    entry = _best().get(dataset, {}).get(method, {})
    sizes = {int(size): values for size, values in entry.items()}
    if not sizes:
        return {}
    chosen = min(sizes, key=lambda size: (abs(size - (buffer_size or 200)), size))
    found = dict(sizes[chosen])
    if chosen:
        found.setdefault("buffer_size", chosen)
    return found


@lru_cache(maxsize=1)
def _best() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(BEST.read_text(encoding="utf-8"))
    return content


def _known(name: str, what: str, names: Any, spellings: Any) -> str:
    if name in names:
        return name
    meant = nearest(name, [spelling.replace("-", "_") for spelling in spellings])
    by_plain = {spelling.replace("-", "_"): spelling for spelling in spellings}
    guess = f"did you mean {by_plain[meant]}? " if meant else ""
    raise ValueError(f"there is no such {what}; {guess}there are: {', '.join(names)}")
