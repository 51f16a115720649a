"""Records of a run: step, epoch, progress, validation and change of ranks, each one JSON line of `metrics.jsonl`.

A record has a field per key, in the order of the file. `from_json` also reads older files: a key that is missing has
its default, one that is unknown is kept in `more` (of a step in `notes`, of a validation in `metrics`). What the report
and the loggers show of an epoch is declared with the field, as a `Number`. To add one:

- measured on each rank and only shown: a field of `epoch.RankEpoch` with its `Number`, and its value in the meter;
- known once per epoch, or read by a verdict: a field of `EpochRecord` with its `Number`, and its value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

from typing_extensions import Self

from paceline.observe.typed_json import declared, fits, is_count, is_number, may_be_list

Json = dict[str, Any]
"""A line of `metrics.jsonl`, as it is written and as callbacks get it."""
Samples = dict[str, list[dict[str, str]]]
"""By validation set: some samples, each as texts by name."""
Analysis = dict[str, dict[str, float]]
"""By validation set: numbers beside its metrics, such as errors by kind."""
Kind = Literal[
    "data", "cores", "communication", "sums", "padding", "balance", "straggler", "recompiles", "launches", "precision"
]
Matter = tuple[Kind, int | None]
"""Subject of a finding: its kind, and the rank where one is named."""
F = TypeVar("F")


# -- how a field is shown, read and written ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number of an epoch as a plot of the report and as `epoch/NAME` of the loggers."""

    title: str = ""
    """Of the plot; empty: there is none."""
    about: str = ""
    unit: str = ""
    factor: float = 1.0
    """From the value in the record to `unit`."""
    place: int = 99
    """Order of the plots."""
    is_logged: bool = True
    """Loggers get it."""


def _field(default: Any = None, *, number: Number | None = None, is_whole: bool = False, null: bool = False) -> Any:
    """Declare a field: `is_whole` where a resumed epoch has it of all launches, not of the last one alone; `null` where
    None is written, not left out."""
    metadata = {"number": number, "is_whole": is_whole, "null": null}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class Part:
    """A JSON object inside a record. All keys are written; those that older files lack have defaults."""

    @classmethod
    def from_json(cls, values: object) -> Self | None:
        """Read an object; a value of another type is as one that is missing. None if it cannot do without."""
        fitting = _fitting(cls, values) if isinstance(values, dict) else {}
        required = [each.name for each in _fields(cls) if each.default is MISSING and each.default_factory is MISSING]
        return cls(**fitting) if isinstance(values, dict) and fitting.keys() >= set(required) else None

    def to_json(self) -> Json:
        return {each.name: getattr(self, each.name) for each in _fields(self)}


def _fields(of: Any) -> tuple[Field[Any], ...]:
    return fields(of)


def _fitting(cls: type, values: Mapping[str, Any]) -> Json:
    """Return the values of a class's fields that have the types of these."""
    kinds = declared(cls)
    return {
        each.name: values[each.name]
        for each in _fields(cls)
        if fits(values.get(each.name), kinds[each.name]) and each.name in values
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_json()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


# -- parts of an epoch's record ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding(Part):
    """One thing that held the run back."""

    kind: Kind
    text: str
    """Observation, with its number."""
    advice: str
    """Options or commands to type."""
    rank: int | None = None
    host: str | None = None
    share: float = 0.0
    """Share of its time that the epoch would have been shorter by (of the work, for padding), as far as is known:
    findings come in this order. A late rank costs what the others wait; uneven work less, as they would have more of
    it."""

    @property
    def matter(self) -> Matter:
        return self.kind, self.rank

    @property
    def line(self) -> str:
        return f"{self.text}: {self.advice}"


@dataclass(frozen=True)
class Memory(Part):
    """Peak memory of a rank so far."""

    host_bytes: int | None = _field(
        number=Number("Host memory", "Of the rank that needed most, the most so far.", "GiB", 2.0**-30, 5)
    )
    device_bytes: int | None = _field(
        number=Number("Device memory", "Of the rank that needed most, the most so far.", "GiB", 2.0**-30, 6)
    )
    """None on a CPU."""


@dataclass(frozen=True)
class Meetings(Part):
    """Time that several ranks spent on each other."""

    exchange: float = 0.0
    """Share of all ranks' time in which numbers moved."""
    waiting: float = 0.0
    """Share of all ranks' time in which they waited for one that was late."""
    last: Sequence[float] = ()
    """By rank: share of the meetings to which it came last."""
    waited_for: Sequence[float] | None = None
    """By rank: share of the others' time in which they waited for it. None in older records."""


@dataclass(frozen=True)
class DeviceSteps(Part):
    """Sampled steps of GPUs."""

    name: str = ""
    sampled_steps: int = 0
    ms: Sequence[Mapping[str, float]] = ()
    """By rank: milliseconds of a step, by phase."""
    caught_up: Sequence[float] = ()
    """By rank: share of the steps whose work was done before the host had launched it all."""


@dataclass(frozen=True)
class Compilation(Part):
    """Recompilations of a compiled model in the epoch."""

    recompiles: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class CoreShare(Part):
    """Cores that a rank may run on, together with the other ranks of its host that may run on any of them."""

    ranks: int = 1
    """These ranks, itself included: 1 where a launcher has bound it to cores of its own."""
    cores: int = 1
    """All cores that these ranks may run on."""


@dataclass(frozen=True)
class Way(Part):
    """Settings and facts that findings depend on. Defaults are for records that are older than one of them."""

    level: int | None = None
    highest_level: int = 3
    """Highest level that may be advised: not every task or setting goes with each."""
    precision: str | None = None
    order: str | None = None
    bins: int | None = None
    reduce: str | None = None
    wire: str | None = None
    shard: str | None = None
    sync_step: int | None = None
    sync_overlap: int = 0
    workers: int | None = None
    is_stream: bool = False
    is_packed: bool = False
    cores: int = 1
    """Cores that the first rank may run on. `EpochRecord.core_shares` has all ranks'."""
    local_size: int = 1
    grains_per_rank: int = 1
    has_bf16: bool = False
    depthwise: bool = False
    """The model has depthwise convolutions."""


@dataclass(frozen=True)
class Profile(Part):
    """Sampled steps, and sizes of the model: what `paceline predict` is calibrated on."""

    device: str = "cpu"
    """Type of the ranks' devices."""
    steps: Sequence[Sequence[Sequence[float]]] = ()
    """By rank, of some steps: number in the epoch, and seconds of data (the next step's), transfer, compute,
    communication, optimizer, and all else."""
    costs: Sequence[Sequence[float]] = ()
    """Of these steps: costs of all grains of the global batch (samples x longest, or samples); they do not depend on
    the number of ranks. Empty for data of unknown length."""
    epoch_steps: int = 0
    """Steps of a whole epoch; 0 where that is not known."""
    has_lengths: bool = False
    in_blocks: bool = False
    """Ranks have grains that follow each other."""
    buckets: Sequence[int] = ()
    """Bytes of the buckets in which gradients are sent, in their order."""
    blocks: Sequence[int] = ()
    """Bytes of the blocks that `--shard full` cuts the model into; the last one is of what is in no block."""
    tensors: int = 0
    """Number of trained parameters."""
    weights: int = 0
    """Numbers in them; `moving`, `buffers` and `state` are those of their moving average, of buffers, of the
    optimizer's state."""
    moving: int = 0
    buffers: int = 0
    state: int = 0
    itemsize: int = 4
    """Bytes of a weight as the optimizer has it."""


@dataclass(frozen=True)
class Launch(Part):
    """The last launch of an epoch within which the run was resumed."""

    steps: int = 0
    seconds: float = 0.0


# -- records -----------------------------------------------------------------------------------------------------------


class StepRecord(NamedTuple):
    """A training step. A tuple, because a run has millions of them."""

    step: int
    """Number over the whole run, from 0."""
    epoch: int = 0
    """From 1, in its stage; so in all records."""
    loss: float | None = None
    lr: float | None = None
    notes: Mapping[str, Any] = {}
    """Gradient norm, loss scale, spread of the ranks, rates of layers as `larc/...`, and whatever else a step has."""

    @staticmethod
    def line(step: int, epoch: int, loss: float | None, lr: float | None, notes: Mapping[str, Any]) -> Json:
        """Return the JSON of a step, without an object of this class: it happens at every step."""
        return {"kind": "step", "step": step, "epoch": epoch, "loss": loss, "lr": lr, **notes}

    def to_json(self) -> Json:
        return self.line(*self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> StepRecord:
        notes = {name: value for name, value in line.items() if name not in STEP_KEYS and is_number(value)}
        epoch, loss, lr = line.get("epoch"), line.get("loss"), line.get("lr")
        return cls(
            line["step"],
            epoch if is_count(epoch) else 0,
            loss if is_number(loss) else None,
            lr if is_number(lr) else None,
            notes,
        )


STEP_KEYS = frozenset(("kind", "step", "epoch", "loss", "lr"))
"""Keys that every step has; all others are `notes`."""


@dataclass(frozen=True)
class ProgressRecord:
    """How far a run is, and how fast: a look at it while steps are logged, at most two in a second.

    Steps have no times in them, so that equal runs have equal steps; here they are.
    """

    step: int
    """Last step before it."""
    epoch: int = 0
    epochs: int | None = None
    """Of the stage; None where that is not known."""
    stage: str | None = None
    """Name and number, where there are several."""
    done: float | None = None
    """Share of the whole run's steps; None where their number is not known."""
    left_s: float | None = None
    """Seconds until the end, at the speed so far."""
    time: float | None = None
    """Moment, in seconds since 1970."""
    samples_per_s: float | None = None
    """Samples of all ranks per second in the steps since the record before, without validation and checkpoints."""

    def to_json(self) -> Json:
        values = {each.name: getattr(self, each.name) for each in _fields(self)}
        return {"kind": "progress", **{name: value for name, value in values.items() if value is not None}}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> ProgressRecord:
        """Read a line of any journal: a value that cannot be right is as one that is missing."""
        values = {each.name: line[each.name] for each in _fields(cls) if _may_be(each.name, line.get(each.name))}
        return cls(**{"step": -1, **values})


def _may_be(name: str, value: Any) -> bool:
    """Return True if a field of `ProgressRecord` may have this value."""
    if name == "stage":
        return isinstance(value, str)
    if name in ("step", "epoch", "epochs"):
        return isinstance(value, int) and not isinstance(value, bool)
    return is_number(value) and math.isfinite(value) and value >= 0


@dataclass(frozen=True)
class RanksRecord(Part):
    """The ranks from a step on, where those that survive another's death go on (`--on-failure continue`)."""

    step: int
    """Last step before it; 0 before the first."""
    epoch: int = 0
    ranks: int = 1
    time: float = 0.0
    """Moment, in seconds since 1970."""
    hosts: Sequence[str] = ()
    """By rank."""
    lost: Sequence[Mapping[str, Any]] = ()
    """Who was lost before it: `rank`, `host` and `why`."""
    joined: Sequence[Mapping[str, Any]] = ()
    """Who has joined with it: `rank` and `host`."""
    seconds: float = 0.0
    """From the loss, or from when the others left their last step, until all were set up again."""
    repeated: int = 0
    """Steps that had been done, and were done again."""

    def to_json(self) -> Json:
        return {"kind": "ranks", **super().to_json()}


@dataclass(frozen=True)
class ValidationRecord:
    """A validation: metrics of all validation sets."""

    step: int
    """Last step before it."""
    epoch: int = 0
    seconds: float = 0.0
    """Duration on the first rank."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """By `set/metric`."""
    samples: Samples | None = None
    """Some samples, where the task shows them."""
    analysis: Analysis | None = None
    """Numbers beside the metrics, where the task has some."""

    def to_json(self) -> Json:
        head = {"kind": "validation", "step": self.step, "epoch": self.epoch, "seconds": self.seconds}
        more = {"analysis": self.analysis, "samples": self.samples}
        return {**head, **self.metrics, **{name: value for name, value in more.items() if value}}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> ValidationRecord:
        metrics = {
            name: value if is_number(value) or "/" not in name else None
            for name, value in line.items()
            if name not in _VALIDATION_KEYS
        }
        return cls(**{**_fitting(cls, line), "metrics": metrics})


_VALIDATION_KEYS = frozenset(("kind", "step", "epoch", "seconds", "samples", "analysis"))


@dataclass(frozen=True)
class EpochRecord:
    """An epoch, over all ranks. Sequences are by rank."""

    step: int = 0
    """Its last step."""
    epoch: int = 0
    stage: str | None = None
    """Named where there are several."""
    steps: int = 0
    loss: float | None = _field(number=Number(), null=True)
    """Mean over its steps."""
    skipped: int = 0
    padding: float | None = _field(
        number=Number("Padding", "Share of a batch that holds nothing.", "%", 100.0, 1), null=True
    )
    """None where lengths are not known."""
    compiled: int | None = _field(number=Number("Compiled", is_logged=False))
    """Graphs that were compiled since the start."""
    graphs: Mapping[str, Any] | None = None
    """CUDA graphs that were recorded."""
    samples: int | None = _field(is_whole=True)
    objects_per_s: float | None = _field(
        number=Number("Samples per second", "Over all ranks, in the time of the slowest.", "samples/s", 1.0, 0),
        is_whole=True,
    )
    core_wait: Sequence[float | None] = _field((), is_whole=True)
    """Seconds in which the rank could have gone on, but had no core (None where that is not known)."""
    sums: Sequence[float] | None = _field(is_whole=True)
    """Seconds of the rank's host that adding in one order has taken, beyond a sum in any order; None if none."""
    work: Sequence[float] = _field((), is_whole=True)
    """Amount that the rank computed, in lengths with their padding, or in samples."""
    computing: float | None = _field(
        number=Number("Computing time", "Share of the ranks' time in which they did not wait for data.", "%", 100.0, 2),
        is_whole=True,
    )
    """Share of all ranks' time in which they did not wait for data."""
    seconds: Sequence[Mapping[str, float]] = _field((), is_whole=True)
    """Seconds by phase (`clock.PHASES`); on a GPU the phases of a step are as its events say."""
    between: Sequence[Mapping[str, float]] = _field((), is_whole=True)
    """The same of the time since the last epoch's record: its validation and checkpoint, mostly."""
    rates: Mapping[str, float] = _field({}, is_whole=True)
    """Speeds by name, over all ranks: `samples_per_s`, `tokens_per_s`, ..."""
    memory: Sequence[Memory] = ()
    flops_per_s: float | None = _field(
        number=Number("Arithmetic", "What the model needs, over all ranks.", "TFLOP/s", 1e-12, 4)
    )
    """Over all ranks, where the task knows its FLOPs."""
    mfu: float | None = _field(
        number=Number(
            "Model FLOPs utilisation", "What the model needs, of what the devices could do at most.", "%", 100.0, 3
        )
    )
    """Share of the devices' peak, where that is known."""
    meetings: Meetings | None = None
    device: DeviceSteps | None = None
    compile: Compilation | None = None
    hosts: Sequence[str] | None = None
    core_shares: Sequence[CoreShare] | None = None
    """None in older records."""
    way: Way | None = None
    profile: Profile | None = None
    """Of the first epochs of a launch."""
    launch: Launch | None = None
    """Where the run was resumed within this epoch: steps and seconds since. Findings, and fields that are not
    `is_whole`, are of these; all else is of the whole epoch, without steps that were lost and done again."""
    findings: Sequence[Finding] | None = None
    """By weight; None in a record that is older than verdicts."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that ranks measured and that are only shown (`epoch.RankEpoch`), and keys of other versions."""

    @property
    def elapsed_s(self) -> float:
        """Seconds of the slowest rank."""
        return max((sum(rank.values()) for rank in self.seconds), default=0.0)

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Yield what is drawn over epochs, by name: speeds by unit, declared numbers, and unknown ones."""
        for each in _fields(self):
            shown, value = each.metadata.get("number"), getattr(self, each.name)
            if shown is not None and shown.title and value is not None:
                yield each.name, value
        yield from ((name, value) for name, value in self.more.items() if is_number(value))
        yield from self.rates.items()
        yield from self.memory_peaks().items()

    def memory_peaks(self) -> dict[str, int]:
        """Return the memory of the rank that had most, by kind."""
        peaks = {
            each.name: max((getattr(rank, each.name) or 0 for rank in self.memory), default=0)
            for each in _fields(Memory)
        }
        return {name: peak for name, peak in peaks.items() if peak}

    def with_whole(self, whole: EpochRecord) -> EpochRecord:
        """Return this record of the last launch, with the numbers of all launches where there are any."""
        names = [each.name for each in _fields(self) if each.metadata.get("is_whole")]
        return replace(self, **{name: getattr(whole, name) for name in names}, more={**self.more, **whole.more})

    def to_json(self) -> Json:
        line: Json = {"kind": "epoch"}
        for each in _fields(self):
            value = getattr(self, each.name)
            if each.name == "more":
                line |= value
            elif value is not None or each.metadata.get("null"):
                line[each.name] = _plain(value)
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> EpochRecord:
        values: Json = {}
        names = {"kind"}
        kinds = declared(cls)
        for each in _fields(cls):
            names.add(each.name)
            value = _read(line.get(each.name), _PARTS.get(each.name), kinds[each.name])
            if value is not None:
                values[each.name] = value
        return cls(**values, more={name: value for name, value in line.items() if name not in names})


_PARTS: dict[str, type[Part]] = {
    "memory": Memory,
    "meetings": Meetings,
    "device": DeviceSteps,
    "compile": Compilation,
    "way": Way,
    "profile": Profile,
    "core_shares": CoreShare,
    "launch": Launch,
    "findings": Finding,
}
"""Fields of an epoch that are JSON objects, or lists of them."""


def _read(value: Any, part: type[Part] | None, kind: Any) -> Any:
    """Return a value of an epoch's field, None where it has another type; findings that are none are left out."""
    if part is None:
        return value if fits(value, kind) else None
    if not may_be_list(kind):
        return part.from_json(value)
    if not isinstance(value, list):
        return None
    parts = [part.from_json(each) for each in value]
    if part is Finding:
        return [each for each in parts if each is not None]
    return None if None in parts else parts


def declared_numbers(*of: Any) -> dict[str, Number]:
    """Return the numbers that fields of these classes declare, in their order on a page."""
    numbers = {each.name: each.metadata["number"] for one in of for each in _fields(one) if each.metadata.get("number")}
    return dict(sorted(numbers.items(), key=lambda pair: pair[1].place))
