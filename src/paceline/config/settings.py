"""Every setting of a training run, as frozen models: one section per concern, one flat name space for the user.

`TrainConfig` joins the sections, so a setting has the same name in Python, in YAML and on the command line.
A field marked `free` may differ between a run and its resumption without changing what is computed; one marked
`per_rank` may also differ between the ranks of a run. A field is neither unless it says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.config.change_points import ChangePoint, parse_all
from paceline.config.named_sets import SetWord
from paceline.config.plugin_name import PluginName
from paceline.config.step_range import StepRange
from paceline.core.cloud.address import AbsolutePlace, Place, is_address
from paceline.core.failure_rate import PUBLISHED, BadFailureRate, parse_failures
from paceline.core.paths import AbsolutePath
from paceline.core.together import SettingsExclusion

_MAX_NAME, _MAX_PATH = 255, 4095
"""Bytes, on all usual file systems of Linux."""
Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Order = Literal["none", "random", "sorted", "laplace", "bucket"]
BuiltInOptimizer = Literal["sgd", "adam", "adamw", "novograd", "lamb", "lars", "muon"]
OptimizerName = BuiltInOptimizer | Annotated[str, PluginName("optimizers")]
BuiltInLogger = Literal["tensorboard", "wandb", "mlflow"]
LoggerName = BuiltInLogger | Annotated[str, PluginName("loggers")]
BuiltInSchedule = Literal[
    "constant",
    "cosine",
    "square",
    "sqrt",
    "linear",
    "inverse-sqrt",
    "polynomial",
    "exponential",
    "piecewise",
    "noam",
    "newbob",
]
ScheduleName = BuiltInSchedule | Annotated[str, PluginName("schedules")]


def _as_failures(text: str) -> str:
    try:
        parse_failures(text)
    except BadFailureRate as error:
        raise ValueError(f"{error.why}, such as `4/1000nd` or `2.3-6.5/1000nd`") from error
    return text


def free(default: Any, **extra: Any) -> Any:
    """Return a field that does not change numerics: resuming with another value needs no permission."""
    return Field(default, json_schema_extra={"free": True}, **extra)


def per_rank(default: Any, **extra: Any) -> Any:
    """Return a field that each rank may set for itself: no result and no collective depends on it.

    All other fields are compared when the ranks meet.
    """
    return Field(default, json_schema_extra={"free": True, "per_rank": True}, **extra)


class Section(BaseModel):
    """Settings of one concern."""

    # Older versions of pydantic warn of names that begin with `model_`, which tasks may well have.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of fields that are accepted in files and on the command line."""
    together: ClassVar[tuple[str, ...]] = ()
    """Fields that say one thing: where a run is used, giving one of them anew forgets what the run had for all."""

    if not TYPE_CHECKING:  # type checkers know the fields as arguments

        def __init__(self, /, **values: Any) -> None:
            """Make settings in Python; mistakes are raised as `fit` raises them, all at once."""
            try:
                super().__init__(**values)
            except ValidationError:
                from paceline.config.python_call import settings_of_call

                made = settings_of_call(type(self), values, type(self).__name__)
                super().__init__(**{name: getattr(made, name) for name in made.model_fields_set})  # it had aliases

        # Else pydantic would call it for values from files and the command line, too.
        __init__.__pydantic_base_init__ = True

    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = ()
    """Settings of this section that cannot go together; a class declares those beside its bases' own."""

    @classmethod
    def forgotten(cls, typed: Mapping[str, Any]) -> frozenset[str]:
        """Return the fields whose value in a run's record has no use beside those that were given anew."""
        return frozenset(cls.together) if typed.keys() & set(cls.together) else frozenset()

    def contradictions(self) -> Iterator[str]:
        """Yield what is wrong between settings that are right by themselves: a line each, with names in backticks.

        All are collected before any is shown. These are the `exclusions`; a class adds what it misses to those of
        `super()`.
        """
        yield from (each.describe(self) for each in self.excluded())

    def excluded(self) -> list[SettingsExclusion]:
        """Return the declared exclusions that these settings run into."""
        return [each for each in exclusions_of(type(self)) if each.applies(self)]

    @field_validator("*", mode="after")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        """Refuse paths that no file system has, before something else fails because of them."""
        for path in value if isinstance(value, tuple) else ():
            cls._check_names(path)
        if isinstance(value, Path):
            if is_address(value):
                raise ValueError("is an address, and this must be a path of this machine")
            longest = max((len(os.fsencode(part)) for part in value.parts), default=0)
            if "\0" in str(value):
                raise ValueError("a path has no zero bytes")
            if longest > _MAX_NAME or len(os.fsencode(value)) > _MAX_PATH:
                raise ValueError(f"is too long: a name has at most {_MAX_NAME} bytes, a path {_MAX_PATH}")
        return value

    @model_validator(mode="after")
    def _check_contradictions(self) -> Section:
        wrong = list(self.contradictions())
        if wrong:
            raise ValueError("\n".join(wrong))
        return self


def exclusions_of(section: type[Section]) -> list[SettingsExclusion]:
    """Return the exclusions of a section and of all that it is made of."""
    return [each for base in reversed(section.__mro__) for each in vars(base).get("exclusions", ())]


class RunSettings(Section):
    """Where a run lives and how it starts."""

    out: Place | None = free(None)
    """Run folder, or an address such as `s3://bucket/run`. Made if absent; an existing run is only touched with
    `resume`."""
    resume: Literal["no", "auto"] | Place = free("no")
    """`auto`: from the newest sound checkpoint in `out`, or from the start if there is none; or a checkpoint's path."""
    allow_change: bool = free(False)
    """Resume although settings that change numerics differ from the run's."""
    init_from: Place | None = free(None)
    """For fine-tuning: weights that are loaded by name before the first step. A checkpoint, a `.safetensors` or `.pt`
    file, a Hugging Face folder, or a torch.distributed.checkpoint."""
    exp_name: str | None = free(None)
    """Name of the run: its folder is `runs_dir/exp_name`, numbered where that name is taken; `out` goes before it."""
    runs_dir: Place = free(Path("runs"))
    """Where named runs live."""
    log_every: Positive = free(10)
    """Steps between log lines; device counters are read then and only then."""


class WorldSettings(Section):
    """Where the ranks compute and how long they wait for each other."""

    device: Literal["auto", "cpu", "cuda"] = per_rank("auto")
    """`auto` takes CUDA where there is one."""

    @field_validator("device", mode="before")
    @classmethod
    def _name_device(cls, value: Any) -> Any:
        """Take a `torch.device` by its name."""
        return str(value) if type(value).__name__ == "device" else value

    threads: Positive | None = per_rank(None)
    """CPU threads per rank; if not set, the environment's `OMP_NUM_THREADS`, else the cores shared evenly."""
    start_timeout_s: PositiveFloat = per_rank(300.0)
    """Seconds to wait at the start for ranks that have not arrived."""
    timeout_s: PositiveFloat = per_rank(1800.0)
    """Seconds a collective may wait for a rank."""


class DataSettings(Section):
    """Which samples make a step, in which order, cut into which grains."""

    aliases = {"horovod_dataset_distribution": "dataset_distribution"}
    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "`--batch-per-device`",
            "`--global-batch`",
            "one thing twice",
            "Both say how large a step is: per rank, or over all ranks.",
            "set `batch_per_device` or `global_batch`, not both",
            lambda s: s.batch_per_device is not None and s.global_batch is not None,
        ),
        SettingsExclusion(
            "`--batch-per-device`",
            "`--batch-cost`",
            "one thing twice",
            "Both say how large a step is: by samples of a rank, or by the length of all.",
            "set `batch_per_device` or `batch_cost`, not both",
            lambda s: s.batch_per_device is not None and s.batch_cost is not None,
        ),
        SettingsExclusion(
            "`--drop-last`",
            "`--batch-cost`",
            "mathematics",
            "Batches by length have any number of samples: none is one that is not full.",
            "`drop_last` is about batches of so many samples, and `batch_cost` makes them by length: leave one out",
            lambda s: s.drop_last and s.batch_cost is not None,
        ),
        SettingsExclusion(
            "`--batch-schedule`, `--length-schedule`",
            "`--dataset-distribution random_seed_offset`",
            "mathematics",
            "A rank then knows its own order only, and not how many steps an epoch of the others has.",
            "a schedule of batches or lengths needs `dataset_distribution` shard: with orders of their own, ranks do "
            "not know each other's steps",
            lambda s: bool(s.batch_schedule or s.length_schedule) and s.dataset_distribution != "shard",
        ),
    )

    global_batch: Positive | None = None
    """Samples per step over all ranks. With `batch_cost` it is the cap on samples."""
    batch_per_device: Positive | None = None
    """Samples per step and rank, instead of `global_batch`: more ranks then make a larger batch, see `scale_lr`."""
    batch_cost: PositiveFloat | None = None
    """Total length (seconds, tokens: the unit of the lengths) per step over all ranks, padding counted."""
    batch_schedule: tuple[str, ...] = ()
    """Sizes of the batch that follow: `64@1000` from step 1000 of the stage on, `64@e3` from epoch 3; of `batch_cost`
    where that is set, else of samples. Grains grow with it."""
    length_schedule: tuple[str, ...] = ()
    """Length of the longest samples that are trained on: `100@0 200@1000 none@5000`; longer ones wait, and are left out
    of an epoch that ends before."""
    grains: Positive | None = None
    """Micro-batches per step, the unit of numerics; one per rank of the first launch if not set."""
    regrain: bool = free(False)
    """Allow a resumed run to be cut into another number of grains; losses then differ from the first launch."""
    order: Order = "random"
    """Order of the samples in an epoch; the last three need lengths."""
    bins: Positive | None = None
    """Bins of `laplace` (2) or length buckets of `bucket` (16)."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is not full: other samples in each epoch, unless `order` is none."""
    partition_epoch: Positive = 1
    """Sub-epochs that one pass over the data is cut into."""
    dataset_distribution: Literal["shard", "random_seed_offset"] = "shard"
    """`shard`: ranks share one pass. `random_seed_offset`: every rank walks all data in its own order."""
    eval_batch: Positive | None = None
    """Samples per validation batch; the training grain's size if not set."""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = per_rank("auto")
    """Loader processes per rank (threads for packed data on a GPU); `auto` measures how long a grain takes to read."""
    train_files: tuple[AbsolutePlace, ...] = free(())
    """Packed files (RETURNN's HDF, too) to train on instead of the task's own data: together one data set."""
    val_files: tuple[SetWord, ...] = free(())
    """Packed files to validate on instead of the task's own sets, each a set named by its file or as `name=a.hdf`;
    several files of one set are `name=a.hdf+b.hdf`."""
    limit_batches: Positive | None = None
    """Steps per epoch and batches per validation set at most, for a quick try."""

    @field_validator("batch_schedule", "length_schedule", mode="after")
    @classmethod
    def _check_points(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_all(value)
        return value

    @property
    def batch_points(self) -> list[ChangePoint]:
        """`batch_schedule`, parsed."""
        return parse_all(self.batch_schedule)

    @property
    def length_points(self) -> list[ChangePoint]:
        """`length_schedule`, parsed."""
        return parse_all(self.length_schedule)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for text, point in zip(self.batch_schedule, self.batch_points, strict=True):
            if point.value is None:
                yield f"`batch_schedule` {text}: a batch has a size"
            elif self.batch_cost is None and point.value != int(point.value):
                yield f"`batch_schedule` {text}: samples are whole numbers; sizes by length need `batch_cost`"

    @property
    def max_samples(self) -> int:
        """Cap on samples per step."""
        return self.global_batch or self.batch_per_device or (2**31 - 1 if self.batch_cost else 32)


_BY_LEVEL: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("bf16", "bfloat16"), (2, 3, 4)),
    **dict.fromkeys(("fp32", "float32", "32"), (0,)),
    "tf32": (1,),
}
"""Types that a level brings, by name: the levels that have them, the first one where none is set."""
_PRECISIONS = {
    **dict.fromkeys(("16", "float16", "half", "amp", "fp16"), "fp16"),
    **dict.fromkeys(("64", "float64", "double", "fp64"), "fp64"),
}
"""Words of other toolkits for our precisions."""
_OWN_PRECISIONS = ("fp16", "fp16-master", "fp16-pure", "fp64")


class StepSettings(Section):
    """What one training step computes with."""

    aliases = {"code_optimization": "level"}
    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "`--precision fp64`",
            "`-O2`, `-O3`, `-O4`",
            "one thing twice",
            "Both say in which dtype a step computes, one with more digits and one with fewer.",
            "`level` {s.level} lowers the precision and `precision` fp64 raises it: leave one of them out",
            lambda s: s.precision == "fp64" and s.level in (2, 3, 4),
        ),
        SettingsExclusion(
            "`--clip-norm`",
            "`--clip-value`",
            "one thing twice",
            "Both clip gradients, and which comes first would change the result.",
            "set `clip_norm` or `clip_value`, not both",
            lambda s: s.clip_norm is not None and s.clip_value is not None,
        ),
    )

    seed: int = 0
    """Keys all randomness: initial weights, data order, dropout, augmentation."""
    level: Literal["auto", 0, 1, 2, 3, 4] = "auto"
    """0 strict fp32, 1 TF32, 2 bf16, 3 bf16 + compile, 4 the fastest by measurement; `auto` is the fastest way that is
    known for the task where a GPU has bf16, else 0."""
    precision: Literal["fp16", "fp16-master", "fp16-pure", "fp64"] | None = None
    """fp16 autocast, fp16 weights with fp32 masters, all fp16, or all fp64, instead of the level's dtype. `bf16`,
    `tf32` and `32` (also as `bf16-mixed`, `32-true`) stand for the level that brings them."""

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, value: int) -> int:
        if not -(2**63) <= value < 2**63:
            raise ValueError("must fit into 64 bits")
        return value

    @model_validator(mode="before")
    @classmethod
    def _understand_precision(cls, values: Any) -> Any:
        """Take words of other toolkits (`16-mixed`, `64-true`), and types that a level brings (`bf16`, `32`) as it."""
        if not isinstance(values, dict) or values.get("precision") is None:
            return values
        typed = str(values["precision"]).lower().removeprefix("torch.")  # a dtype
        word, level = typed.removesuffix("-mixed").removesuffix("-true"), values.get("level", "auto")
        if word in _BY_LEVEL:
            levels = _BY_LEVEL[word]
            if str(level) == "auto":
                return {**values, "precision": None, "level": levels[0]}
            if str(level) in map(str, levels):
                return {**values, "precision": None}
            return values  # both are named, and contradict each other
        if word in _PRECISIONS:
            name = "fp16-pure" if typed.endswith("16-true") else _PRECISIONS[word]
            return {**values, "precision": name}
        return values

    @field_validator("precision", mode="before")
    @classmethod
    def _check_precision(cls, value: Any) -> Any:
        """Explain a type that the level does not bring."""
        word = str(value).lower().removesuffix("-mixed").removesuffix("-true")
        if word in _BY_LEVEL:
            raise ValueError(f"contradicts the level: {word} is level {_BY_LEVEL[word][0]}; leave one of them out")
        if value not in (*_OWN_PRECISIONS, None):
            own = ", ".join(_OWN_PRECISIONS)
            raise ValueError(f"must be one of {own}, or bf16, tf32 or 32, which stand for the level that brings them")
        return value

    compile_mode: Literal["default", "max-autotune"] = "default"
    """How hard the compiler of level 3 tries: `max-autotune` measures kernels, for minutes at the start."""
    cuda_graphs: bool = free(True)
    """Replay steps from CUDA graphs where `auto` or level 4 chooses them; `no` to see if a failure comes from them."""
    loss_scale: Literal["backoff", "logmax"] | PositiveFloat = "backoff"
    """How fp16 losses are scaled: dynamic, by gradient statistics, or a constant."""
    clip_norm: PositiveFloat | None = None
    """Clip the global gradient norm."""
    clip_value: PositiveFloat | None = None
    """Clip each gradient element."""
    max_skipped: Positive = 20
    """Steps in a row skipped for non-finite gradients before the run fails."""
    freeze: tuple[str, ...] = ()
    """Name patterns of parameters that are not trained."""
    checkpoint_activations: tuple[str, ...] = ()
    """Name patterns of modules whose activations are recomputed in backward."""
    ema: Fraction = 0.0
    """Decay of an exponential moving average of the weights (0: none); validation then uses the average."""
    swa_start: Positive | None = None
    """Stochastic weight averaging: from this step on, the mean of the weights is kept, validated and saved."""
    swa_every: Positive = 100
    """Steps between two weights that go into the mean."""
    swa_lr: PositiveFloat | None = None
    """Constant learning rate from `swa_start` on; that of the schedule if not set."""
    swa_statistics: Positive = 100
    """Batches of training data on which batch-norm statistics of the mean are measured before it is validated or
    saved."""


_FOR_PARAM = ("sync_step", "sync_seconds", "sync_state", "sync_overlap", "outer", "outer_lr", "outer_momentum")


class ReduceSettings(Section):
    """How the ranks come to one model."""

    aliases = {
        "reduce_type": "reduce",
        "param_sync_step": "sync_step",
        "param_sync_time_diff": "sync_seconds",
        "horovod_reduce_type": "reduce",
        "horovod_param_sync_step": "sync_step",
        "horovod_param_sync_time_diff": "sync_seconds",
        "fsdp": "shard",
        "fully_shard": "shard",
    }
    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "`--sync-step`",
            "`--sync-seconds`",
            "one thing twice",
            "Both say when ranks are averaged.",
            "set `sync_step` or `sync_seconds`, not both",
            lambda s: s.sync_step is not None and s.sync_seconds is not None,
        ),
        SettingsExclusion(
            "`--sync-batchnorm`",
            "`--reduce param`",
            "mathematics",
            "With `param` ranks step apart, and do not meet inside of a step.",
            "`sync_batchnorm` needs `reduce` grad: with param, ranks do not meet in a step",
            lambda s: s.reduce == "param" and s.sync_batchnorm != "no",
        ),
        SettingsExclusion(
            "`--shard full`, `--shard node`",
            "`--reduce param`",
            "mathematics",
            "With `param` every rank steps with a model of its own, which must be whole.",
            "`shard` {s.shard} needs `reduce` grad: with param, every rank has a whole model",
            lambda s: s.reduce == "param" and s.shard != "none",
        ),
        SettingsExclusion(
            "`--wire int8`",
            "`--reduce grad`",
            "mathematics",
            "What rounding to 8 bits loses must be sent the next time. Averages of weights can wait for it; gradients "
            "of a step are used once, and its loss would be another one on every number of ranks.",
            "`wire` int8 is for `reduce` param; gradients travel as full, fp16 or bf16",
            lambda s: s.reduce == "grad" and s.wire == "int8",
        ),
    )

    reduce: Literal["grad", "param"] = "grad"
    """`grad`: gradients are summed at every step. `param`: ranks step apart and average their weights now and then."""
    sums: Literal["exact", "fast"] | None = None
    """`exact`: sums over the grains of a step have one order, so that results are the same bits on any number of ranks.
    `fast`: as the library adds. If not set, exact; a resumed run goes on as it began."""
    shard: Literal["none", "full", "node"] = free("none")
    """`full` (FSDP2): each rank keeps its piece of weights, gradients and optimizer state; for large models. `node`
    (HSDP): pieces for the ranks of a machine, gradients summed across machines."""
    shard_modules: tuple[str, ...] = free(())
    """Name patterns of modules that are gathered one at a time; large children of Sequential, ModuleList if not set."""
    mirror: bool = free(False)
    """Where a rank has what no other has (`shard`; `param` between averages): keep what survivors of its death need in
    memory, every rank's pieces on a second rank, too. Without it they go back to the newest checkpoint."""
    sync_step: Positive | None = None
    """Steps between two averages (`param`); the end of an epoch is always one."""
    sync_seconds: PositiveFloat | None = None
    """Seconds between two averages, instead of `sync_step`; the ranks agree how many steps that is."""
    sync_state: Literal["average", "keep", "reset"] = "average"
    """The optimizer's state when weights are averaged: averaged too, each rank's own, or begun anew."""
    sync_overlap: Annotated[int, Field(ge=0)] = 0
    """Steps that go on while an average is under way, before it is applied (0: wait for it)."""
    wire: Literal["full", "fp16", "bf16", "int8"] = "full"
    """How numbers travel between ranks; `param` sends differences and feeds back what rounding lost."""
    outer: Literal["plain", "momentum", "nesterov"] = "plain"
    """What is done with an average: taken as it is, with block momentum (BMUF, SlowMo), or Nesterov's (DiLoCo)."""
    outer_lr: PositiveFloat | None = None
    """Step of the outer optimizer; 1 for momentum, 0.7 for Nesterov if not set."""
    outer_momentum: Fraction | None = None
    """Of the outer optimizer; 1 - 1/ranks for momentum, 0.9 for Nesterov if not set."""

    sync_batchnorm: Literal["no", "all"] | Annotated[int, Field(ge=2)] = "no"
    """Batch norm over the joined grains of `all` ranks, or of groups of so many; needs one grain per rank."""

    @field_validator("shard", mode="before")
    @classmethod
    def _accept_other_words(cls, value: Any) -> Any:
        """torch's and DeepSpeed's names, and yes or no."""
        words = {
            **dict.fromkeys(("fsdp", "fsdp2", "full_shard", "zero3", "true", "1"), "full"),
            **dict.fromkeys(("hsdp", "hybrid", "hybrid_shard"), "node"),
            **dict.fromkeys(("no", "false", "0"), "none"),
        }
        return words.get(str(value).lower(), value)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.reduce == "param" and self.sync_step is None and self.sync_seconds is None:
            yield "set `sync_step` (100, say) or `sync_seconds`: when to average with `reduce` param"
        if self.reduce == "grad" and self.wire == "int8":  # more that was meant for param
            others = [name for name in _FOR_PARAM if getattr(self, name) != type(self).model_fields[name].default]
            if others:
                yield f"{' and '.join(f'`{name}`' for name in others)}: for `reduce` param, too"


class GroupSettings(Section):
    """Other optimizer settings for parameters whose name matches."""

    match: str
    """Pattern of parameter names, such as `*.bias`."""
    lr_scale: PositiveFloat = 1.0
    """Factor on the learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Instead of the run's."""


class OptimSettings(Section):
    """How weights are updated."""

    aliases = {"horovod_scale_lr": "scale_lr"}
    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "`--optimizer lars`",
            "`--larc`",
            "one thing twice",
            "LARS is SGD with the layer-wise rates that LARC puts around an optimizer.",
            "LARS has layer-wise rates already: set `larc` with another optimizer, or leave it out",
            lambda s: s.optimizer == "lars" and s.larc is not None,
        ),
        SettingsExclusion(
            "`--warmup-steps`",
            "`--warmup-ratio`",
            "one thing twice",
            "Both say how long the warm-up is.",
            "set `warmup_steps` or `warmup_ratio`, not both",
            lambda s: s.warmup_steps > 0 and s.warmup_ratio is not None,
        ),
    )

    optimizer: OptimizerName = "adamw"
    """Rule of the update; a plugin may bring more."""
    lr: PositiveFloat = 1e-3
    """Learning rate at the top of the schedule."""
    larc: Literal["clip", "scale"] | None = None
    """Layer-wise adaptive rates around the optimizer: at most `lr` (clip), or as the norms say (scale)."""
    larc_eta: PositiveFloat | None = None
    """Step of a tensor relative to its weights; 0.002 for LARC, 0.001 for LARS if not set."""
    larc_epsilon: Annotated[float, Field(ge=0)] = 1e-7
    """Added to the norm of the gradient."""
    larc_min_update: Annotated[float, Field(ge=0)] = 1e-7
    """Least factor on a gradient."""
    larc_decay: Literal["apart", "inside"] = "apart"
    """Weight decay left to the optimizer (OpenSeq2Seq), or inside the norms and the scaled gradient (Apex)."""
    larc_zero: Literal["freeze", "skip"] = "freeze"
    """Tensors whose weights or gradients are all 0: as the formula says, all but frozen, or left alone (Apex)."""
    larc_exclude: Literal["none", "vectors"] = "none"
    """Which parameters keep their gradients: none, or those of one dimension (biases, norms)."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """With `batch_per_device`: `lr` is for one rank, and grows with their number or its root; warm-up is advised."""
    momentum: Fraction = 0.9
    """Of SGD and LARS."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay of the moments; each optimizer's own default if not set (NovoGrad 0.95, 0.25; the others 0.9, 0.999)."""
    muon_match: tuple[str, ...] = ()
    """Patterns of the parameters that Muon updates, as far as they are matrices, such as `encoder.*`; all hidden
    matrices if not set. AdamW updates the rest."""
    muon_convolutions: bool = False
    """Kernels of convolutions are matrices for Muon, too: output channels by all else."""
    muon_scale: Literal["match-rms-adamw", "original"] = "match-rms-adamw"
    """Length of Muon's steps: as AdamW's, so that its `lr` fits, or as first published (an `lr` of 0.02, say)."""
    muon_momentum: Fraction = 0.95
    """Of Muon, after Nesterov."""
    muon_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    """Newton-Schulz steps of Muon."""
    muon_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """What Muon multiplies matrices in; `auto` is bf16 on a GPU, as published, and fp32 on a CPU."""
    adamw_lr: PositiveFloat | None = None
    """Top of the learning rate of what AdamW updates beside Muon; `lr` if not set."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Pull of the weights towards 0."""
    groups: tuple[GroupSettings, ...] = ()
    """Parameter groups by name pattern, first match wins."""
    schedule: ScheduleName = "constant"
    """How the learning rate goes on after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises to `lr`."""
    warmup_ratio: Fraction | None = None
    """The same as a share of all steps, instead of `warmup_steps`."""
    hold_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at `lr` between warm-up and decay (polynomial, exponential)."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where the decay ends."""
    power: PositiveFloat = 1.0
    """Of the polynomial."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor per `decay_steps` (exponential), per milestone (piecewise), or when scores stop improving (newbob)."""
    decay_steps: Positive | None = None
    """Steps per `decay` (exponential)."""
    milestones: tuple[Positive, ...] = ()
    """Steps at which the learning rate is multiplied by `decay` (piecewise)."""
    model_size: Positive | None = None
    """Width of the model (Noam)."""
    newbob_threshold: float = 0.01
    """Newbob decays when the monitored score improves by less than this, relative to itself."""

    @field_validator("scale_lr", mode="before")
    @classmethod
    def _accept_flag(cls, value: Any) -> Any:
        """RETURNN's `horovod_scale_lr` is true or false."""
        return {"true": "linear", "false": "none", "1": "linear", "0": "none"}.get(str(value).lower(), value)


class ObserveSettings(Section):
    """What is seen and written down while a run goes on."""

    loggers: tuple[LoggerName, ...] = per_rank(("tensorboard",))
    """Where metrics go beside `metrics.jsonl`; needs the package of that name, or a plugin."""
    progress: Literal["auto", "bar", "lines", "none"] = per_rank("auto")
    """A bar on a terminal or in a notebook, plain lines elsewhere and under mpirun."""
    rank_logs: bool = per_rank(True)
    """Each rank's own log file in the run folder, when there are several."""
    profile: str = Field(default="no", json_schema_extra={"free": True, "bare": "auto"})
    """Steps to write a timeline of, as `20:25` (steps 20 to 24); `auto`, or no value, is 5 steps after the first 10."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = free(())
    """Ranks whose own torch events are in the timeline, beside the phases of all; the first 8 if not set."""
    profile_file: AbsolutePath | None = free(None)
    """File for the timeline, beside the one in the run folder: as JSON, packed if it ends in .gz. The environment's
    HOROVOD_TIMELINE is the same."""
    profile_memory: bool = free(False)
    """Memory in the timeline too; on a GPU also the history of its memory, as a snapshot."""

    @field_validator("profile", mode="before")
    @classmethod
    def _check_steps(cls, value: Any) -> str:
        """Yes and no, or a range."""
        word = {"true": "auto", "yes": "auto", "false": "no"}.get(str(value).lower(), str(value))
        if word not in ("no", "auto"):
            StepRange.parse(word)
        return word


class LoopSettings(Section):
    """How long to train, when to look and what to keep."""

    aliases = {"save_every": "save_every_steps"}
    epochs: Positive | None = None
    """Passes over the data (sub-epochs, with `partition_epoch`) of a stage that does not say its own."""
    steps: Positive | None = None
    """Steps of a stage; whichever of `epochs` and `steps` ends first."""
    val_every_steps: Positive | None = free(None)
    """Steps between validations, beside those of `val_every_epochs`."""
    val_every_epochs: Positive | None = free(1)
    """Epochs between validations."""
    val_at_end: bool = free(True)
    """Validate after the run's last step too, so that its last checkpoint has a score; not if a signal ends it."""
    monitor: str | None = free(None)
    """Metric that names the best checkpoint, as `set/metric`; the first validation set's loss if not set."""
    monitor_mode: Literal["min", "max"] = free("min")
    """Whether a lower or a higher `monitor` is better."""
    patience: Positive | None = None
    """Stop after so many validations without a better `monitor`."""
    max_loss_ratio: PositiveFloat | None = free(1e4)
    """The run has diverged, and ends, when its loss stays above so many times the first (or 1); `none`: never."""
    save_every_steps: Positive | Literal["auto"] | None = free(None)
    """Steps between checkpoints, beside those of `save_every_epochs`; `auto`: as many as lose least time, from what a
    checkpoint takes here and how often nodes fail (`failures`)."""
    failures: Annotated[str, AfterValidator(_as_failures)] = free(PUBLISHED)
    """Failures per node-days that `save_every_steps: auto` goes by, such as `4/1000nd`, or a range of them."""
    save_every_epochs: Positive | None = free(1)
    """Epochs between checkpoints; one is always saved at the end."""
    mode: Literal["train", "eval", "train_eval", "infer"] = free("train_eval")
    """`train` without validation, `train_eval` with it, `eval` only validates, `infer` only predicts."""
    split_on_oom: bool = free(False)
    """Where a grain does not fit the memory: cut the batch into twice as many grains and go on, from the newest
    checkpoint or anew. Results are those of that many `grains`. For one rank."""
    benchmark: bool = free(False)
    """Measure speed instead of training: `bench_steps` steps, timed from `bench_start` on, nothing saved."""
    bench_steps: Positive = free(60)
    """Steps of a benchmark."""
    bench_start: Annotated[int, Field(ge=0)] = free(10)
    """First step of a benchmark that is timed."""
    checkpoint_form: Literal["full", "sharded"] = free("full")
    """With `shard`: gathered and written by the first rank, or by every rank its own pieces; either is resumed."""
    keep_last: Positive = free(2)
    """How many of the newest checkpoints are kept."""
    keep_best: Annotated[int, Field(ge=0)] = free(1)
    """How many of the best ones (by `monitor`) are kept beside them."""


class EngineConfig(StepSettings, ReduceSettings, WorldSettings):
    """What an `Engine` in a hand-written loop needs to know."""

    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "`--ema`",
            "`--swa-start`",
            "one thing twice",
            "Both say which average of the weights is validated and saved.",
            "set `ema` or `swa_start`, not both: validation uses one average of the weights",
            lambda s: bool(s.ema) and s.swa_start is not None,
        ),
        SettingsExclusion(
            "`--swa-start`",
            "`--sync-batchnorm`",
            "mathematics",
            "The statistics of a mean of weights are measured on whole batches, each on one rank; a batch norm that is "
            "joined over ranks has statistics of batches that no rank has.",
            "`swa_start` measures batch-norm statistics batch by batch, which `sync_batchnorm` joins over ranks: leave "
            "one out",
            lambda s: s.swa_start is not None and s.sync_batchnorm != "no",
        ),
    )

    @property
    def possible_levels(self) -> tuple[Literal[0, 1, 2, 3, 4], ...]:
        """Levels that a run like this could have: a task's own settings may know fewer, others may exclude some."""
        known = get_args(type(self).model_fields["level"].annotation)
        return tuple(level for level in known if level != "auto" and self._goes_with(level))

    def _goes_with(self, level: int) -> bool:
        return not self.model_copy(update={"level": level}).excluded()


class TrainConfig(LoopSettings, ObserveSettings, OptimSettings, EngineConfig, DataSettings, RunSettings):
    """All settings of a training run."""

    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "`--scale-lr`",
            "`--global-batch`, `--batch-cost`",
            "mathematics",
            "A global batch has one size on any number of ranks, so the learning rate has nothing to follow.",
            "`scale_lr` needs `batch_per_device`: with a global batch, ranks do not change the batch",
            lambda s: s.scale_lr != "none" and s.batch_per_device is None,
        ),
        SettingsExclusion(
            "`--save-every-steps auto`",
            "`--sync-overlap`",
            "mathematics",
            "A checkpoint waits for the average that is under way, so results would depend on how long one takes.",
            "`save_every_steps` auto chooses by measured time, and with `sync_overlap` results depend on when a "
            "checkpoint is saved: name a number of steps",
            lambda s: s.save_every_steps == "auto" and s.reduce == "param" and s.sync_overlap > 0,
        ),
    )

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.swa_start is None:
            for name in ("swa_every", "swa_lr", "swa_statistics"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield f"`{name}` needs `swa_start`: the step from which weights are averaged"
        if self.epochs is None and self.steps is None and self.mode in ("train", "train_eval"):
            yield "set `epochs` or `steps`: how long to train"
