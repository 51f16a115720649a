"""Summary of a run before its first step: facts are collected, pure functions make lines of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.config.settings import TrainConfig
from paceline.core.cloud.address import shown
from paceline.core.paths import absolute
from paceline.core.sum_tree import even_starts, layout
from paceline.core.units import counted, plural, ranges
from paceline.data.partition import MIN_GRAIN, most_grains
from paceline.optim import build, larc, schedule
from paceline.optim.schedule import SCHEDULES
from paceline.parallel.averaged import outer_optimizer
from paceline.speed import loss_scale, precision
from paceline.speed.precision import Precision
from paceline.train.feed import Feed
from paceline.train.prepare import sums_in_tree
from paceline.train.stepper import Stepper
from paceline.world.discover.environment import World
from paceline.world.link import Link

Rows = list[tuple[str, str]]


FELT_SHARE = 0.01
"""Of initial weights in an average at the end of a run, from which on it is said."""


@dataclass(frozen=True)
class Seat:
    """Host, device and threads of one rank."""

    host: str
    device: str
    threads: int
    threads_by: str = ""
    """The variable of the environment that said so."""


@dataclass(frozen=True)
class DataFacts:
    """The data of a stage."""

    num_samples: int | None
    """None for data of unknown length."""
    num_steps: int | None
    """Steps of the coming epoch."""
    total_length: float | None = None
    length_unit: str = ""
    padding: float | None = None
    is_cut: bool = False
    """True if each rank reads a part of its own of data of unknown length."""
    num_left_out: int = 0
    """Samples that are too long for the coming epoch, by `length_schedule`."""


@dataclass(frozen=True)
class ModelFacts:
    """The model and its optimizer."""

    num_parameters: int
    num_trained: int
    optimizer: str
    """Name of its class."""


@dataclass(frozen=True)
class Facts:
    """Everything that the start-up summary shows."""

    config: TrainConfig
    world: World
    seats: list[Seat]
    """Seats by rank."""
    grains: int
    precision: Precision
    data: DataFacts
    model: ModelFacts
    validation: dict[str, int] = field(default_factory=dict)
    """Samples of each set."""
    schedule_steps: int | None = None
    """Length of the learning-rate schedule."""
    stage: str | None = None
    """Name of the stage, where there are several."""
    folder: Path | None = None
    resumed: str | None = None
    """Step and checkpoint."""
    has_group: bool = False
    """True also for one rank with a process group of its own, which reduces as several do."""
    num_cores: int | None = None
    """Cores that this rank may run on."""
    task_rows: Sequence[tuple[str, str]] = ()
    """The task's own lines."""
    has_own_rates: bool = False
    """True if learning rates are not those of the settings: a line of its own tells of them."""

    @property
    def reduces(self) -> bool:
        return self.has_group or self.world.size > 1


def rows(facts: Facts) -> Rows:
    """Return names and values of the start-up summary."""
    config = facts.config
    lines: Rows = []
    if facts.folder is not None:
        lines.append(("run folder", shown(facts.folder)))
    if facts.resumed is not None:
        lines.append(("resumed", facts.resumed))
    lines += _ranks(facts.world, facts.seats)
    lines += _shared_cores(facts.world, facts.num_cores)
    lines += [
        ("batch", batch_line(config, facts.grains, facts.world.size)),
        *_schedules(config),
        ("data" if facts.stage is None else f"data of {facts.stage}", data_line(facts.data)),
        *facts.task_rows,
    ]
    if facts.reduces:
        lines.append(("reduction", _reduction(config, facts.world.size)))
        lines += _order_of_sums(config, facts.grains, facts.world.size, is_cut=facts.data.is_cut)
    if facts.validation:
        sets = ", ".join(f"{name} {_samples(size)}" for name, size in facts.validation.items())
        lines.append(("validation", sets))
    lines += [
        ("parameters", _parameters(facts.model)),
        ("optimizer", _optimizer(config, facts.model.optimizer, facts.schedule_steps)),
    ]
    if not facts.has_own_rates:
        lines.append(("learning rate", _schedule(config, facts.schedule_steps)))
    return lines + precision.rows(facts.precision, loss_scale.describe(config.loss_scale))


def room_for_more(world: World) -> list[str]:
    """Return what there is to say of a process that is alone in an allocation with room for more."""
    return list(world.why[1:]) if world.launcher == "plain" else []


def batch_line(config: TrainConfig, grains: int, size: int) -> str:
    """Return a line such as `global batch 64 = 4 grains of 16 = 2 ranks x 2`."""
    if config.batch_cost is not None:
        each = f"{counted(grains, 'grain')} of {config.batch_cost / grains:.6g}"
        return f"global batch {config.batch_cost:g} (padded length) = {each} = {_shares(grains, size)}"
    whole = config.max_samples
    num_grains = most_grains(whole, grains)
    each = f"{counted(num_grains, 'grain')} of {_even(whole, num_grains)}"
    return f"global batch {whole} = {each} = {_shares(num_grains, size)}"


def _schedules(config: TrainConfig) -> Rows:
    """Return how batches and lengths change."""
    named = {"batch schedule": config.batch_schedule, "longest samples": config.length_schedule}
    return [(name, ", ".join(_change(text) for text in texts)) for name, texts in named.items() if texts]


def _change(text: str) -> str:
    value, _, place = text.partition("@")
    where = f"epoch {place[1:]}" if place.startswith("e") else f"step {place}"
    return f"{'any' if value == 'none' else value} from {where} on"


def _shares(num_grains: int, ranks: int) -> str:
    """Return how many grains each rank has: `2 ranks x 1`, and which have none."""
    if num_grains >= ranks:
        return f"{counted(ranks, 'rank')} x {_even(num_grains, ranks)}"
    idle = ranks - num_grains
    return f"{counted(num_grains, 'rank')} x 1, and {counted(idle, 'rank')} with nothing to do"


def idle_ranks(facts: Facts) -> list[str]:
    """Return a line where a batch is too small to give every rank a grain of its own."""
    config, ranks = facts.config, facts.world.size
    if config.batch_cost is not None or config.dataset_distribution != "shard":
        return []
    num_grains = most_grains(config.max_samples, facts.grains)
    if num_grains >= ranks:
        return []
    cut = f"a batch of {config.max_samples} makes {counted(num_grains, 'grain')} of {MIN_GRAIN} samples or more"
    return [
        f"{ranks - num_grains} of {ranks} ranks have nothing to do: {cut}, and a rank takes whole grains; "
        f"start {counted(num_grains, 'rank')}, or set `--global-batch {MIN_GRAIN * ranks}` or more"
    ]


def no_faster(facts: Facts) -> list[str]:
    """Return a line where fewer ranks would be as fast: the busiest rank has as many grains with them."""
    config, ranks = facts.config, facts.world.size
    if config.batch_cost is not None or config.dataset_distribution != "shard":
        return []
    num_grains = most_grains(config.max_samples, facts.grains)
    if num_grains < ranks:
        return []  # `idle_ranks` says so
    busiest = -(-num_grains // ranks)
    fewer = -(-num_grains // busiest)
    if fewer == ranks:
        return []
    even = ranks * max(1, round(num_grains / ranks))
    return [
        f"{counted(ranks, 'rank')} are no faster than {fewer}: the busiest rank has {busiest} of "
        f"{counted(num_grains, 'grain')} with either; start {fewer}, or a new run with `--grains {even}`"
    ]


def unequal_devices(seats: Sequence[Seat]) -> list[str]:
    """Return a line where ranks have devices of several models: the work is dealt out evenly."""
    ranks: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        ranks.setdefault(seat.device, []).append(rank)
    if len(ranks) < 2:
        return []
    models = ", ".join(f"{name} (rank {ranges(numbers)})" for name, numbers in ranks.items())
    return [
        f"the ranks have different devices: {models}; all get the same amount of work, so the slowest sets the pace, "
        "and kernels of different models round differently: ask the scheduler for one model"
    ]


def _even(total: int, number: int) -> str:
    """Return the sizes of a total cut into equal whole parts: `16`, or `5 or 6`."""
    least, rest = divmod(total, number)
    return f"{least} or {least + 1}" if rest else f"{least}"


def data_line(data: DataFacts) -> str:
    parts = ["samples of unknown number" if data.num_samples is None else _samples(data.num_samples)]
    if data.total_length is not None:
        parts.append(_length(data.total_length, data.length_unit))
    if data.num_steps is not None:
        parts.append(f"{counted(data.num_steps, 'step')} per epoch")
    if data.padding is not None:
        parts.append(f"{100 * data.padding:.1f}% padding")
    if data.num_left_out:
        parts.append(f"{_samples(data.num_left_out)} left out of this epoch, too long for it")
    if data.is_cut:
        parts.append("each rank reads a part of its own: another number of ranks gives other results")
    return ", ".join(parts)


def _shared_cores(world: World, num_cores: int | None) -> Rows:
    """Return a line where our own launcher, which binds no rank to a core, started more ranks than there are cores."""
    if num_cores is None or world.launcher != "procs" or world.local_size <= num_cores:
        return []
    share = f"{counted(world.local_size, 'rank')} share {counted(num_cores, 'core')}"
    return [("cores", f"{share}: `--procs {num_cores}` is likely as fast")]


def _ranks(world: World, seats: list[Seat]) -> Rows:
    devices = Counter(seat.device for seat in seats)
    threads = sorted({seat.threads for seat in seats})
    each = counted(threads[0], "thread") if len(threads) == 1 else f"{threads[0]}-{threads[-1]} threads"
    asked = f" ({seats[0].threads_by})" if seats[0].threads_by else ""
    by = "paceline" if world.launcher == "procs" else world.launcher
    launcher = "no launcher" if by == "plain" else f"launched by {by}"
    why = f" ({'; '.join(world.why)})" if world.why and world.launcher != "plain" else ""
    lines = [
        ("ranks", f"{world.size}, {each} each{asked}, {launcher}{why}"),
        ("devices", ", ".join(f"{number} x {name}" if number > 1 else name for name, number in devices.items())),
    ]
    hosts = Counter(seat.host for seat in seats)
    if len(hosts) > 1:
        lines.append(("hosts", ", ".join(f"{host} ({counted(number, 'rank')})" for host, number in hosts.items())))
    return lines


def _order_of_sums(config: TrainConfig, grains: int, ranks: int, *, is_cut: bool) -> Rows:
    """Return how sums are added, and what it costs where ranks hold no whole nodes of the tree."""
    if config.reduce != "grad":
        return []
    if not sums_in_tree(config):
        return [("sums", "in any order (`sums` fast): another number of ranks gives other last digits")]
    words = "in one order: the same bits on any number of ranks"
    if is_cut or config.dataset_distribution != "shard":
        words = "in one order"
    num_sent = sum(layout(even_starts(grains, ranks)).rows)
    if num_sent > ranks:
        words += (
            f"; {counted(grains, 'grain')} on {counted(ranks, 'rank')} send {num_sent} partial sums instead of {ranks}"
        )
        words += ": a power of two of grains on each rank would not"
    return [("sums", words)]


def _reduction(config: TrainConfig, ranks: int) -> str:
    wire = "" if config.wire == "full" else f", {config.wire} on the wire"
    if config.shard != "none":
        where = "over all ranks" if config.shard == "full" else "over the ranks of each machine"
        return f"gradients summed at every step{wire}, weights, gradients and optimizer state sharded {where}"
    if config.reduce == "grad":
        return f"gradients summed at every step{wire}"
    when = (
        f"every {counted(config.sync_step, 'step')}"
        if config.sync_step is not None
        else f"every {config.sync_seconds:g} s"
    )
    state = {"average": "averaged too", "keep": "kept by each rank", "reset": "begun anew"}[config.sync_state]
    parts = [f"weights averaged {when}", f"optimizer state {state}"]
    if config.sync_overlap:
        parts.append(f"applied {counted(config.sync_overlap, 'step')} later")
    chosen = outer_optimizer.build(config, ranks)
    if chosen is not None:
        parts.append(f"outer {config.outer} with lr {chosen.lr:g}, momentum {chosen.momentum:g}")
    return ", ".join(parts) + wire


def _samples(number: int) -> str:
    return counted(number, "sample")


def _length(total: float, unit: str) -> str:
    if unit == "seconds":
        hours = total / 3600
        number = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
        return f"{number} {plural(float(number.replace(',', '')), 'hour')}"
    return f"{total:,.0f} {unit}" if unit else f"total length {total:,.6g}"


def _parameters(model: ModelFacts) -> str:
    frozen = model.num_parameters - model.num_trained
    return f"{model.num_parameters:,}" + (f", {model.num_trained:,} trained, {frozen:,} frozen" if frozen else "")


def _optimizer(config: TrainConfig, name: str, steps: int | None) -> str:
    parts = [name]
    if config.weight_decay:
        parts.append(f"weight decay {config.weight_decay:g}")
    if config.groups:
        parts.append(f"{counted(len(config.groups), 'parameter group')} of their own")
    rule = larc.rule_of(config)
    if rule is not None:
        how = "with layer-wise rates" if config.optimizer == "lars" else f"LARC ({rule.mode})"
        parts.append(f"{how}, eta {rule.eta:g}")
    if config.clip_norm is not None:
        parts.append(f"gradients clipped to norm {config.clip_norm:g}")
    if config.clip_value is not None:
        parts.append(f"gradients clipped to values of {config.clip_value:g}")
    if config.ema:
        parts.append(f"weights averaged with decay {config.ema:g}{_initial_share(config.ema, steps)}")
    if config.swa_start is not None:
        parts.append(f"mean of the weights every {counted(config.swa_every, 'step')} from step {config.swa_start:,} on")
    return ", ".join(parts)


def _initial_share(decay: float, steps: int | None) -> str:
    """Return how much of an average of weights is still the first ones when the run ends, where that is felt."""
    if steps is None or steps < 1 or decay**steps < FELT_SHARE:
        return ""
    share = f"{100 * decay**steps:.0f}% of it the initial weights, still after {counted(steps, 'step')}"
    lower = math.floor(1e4 * FELT_SHARE ** (1 / steps)) / 1e4
    return f" ({share}: `--ema {lower:g}` keeps less than {100 * FELT_SHARE:g}%)"


def _schedule(config: TrainConfig, steps: int | None) -> str:
    parts = [f"{config.lr:g}"]
    if steps is not None and config.warmup_steps >= steps:
        warmup = f"the warm-up over {counted(config.warmup_steps, 'step')}"
        run = f"the run of {counted(steps, 'step')}"
        return f"{config.lr:g} is not reached: {warmup} is longer than {run} (`--warmup-steps`)"
    if config.warmup_ratio is not None:
        parts.append(f"warm-up over {100 * config.warmup_ratio:g}% of the steps")
    elif config.warmup_steps:
        parts.append(f"warm-up over {counted(config.warmup_steps, 'step')}")
    if config.hold_steps and config.schedule in ("polynomial", "exponential"):
        parts.append(f"held for {counted(config.hold_steps, 'step')}")
    then = "then " if len(parts) > 1 else ""
    over = f" over {counted(steps, 'step')}" if steps is not None and config.schedule != "constant" else ""
    floor = f" to {config.min_lr:g}" if config.min_lr and config.schedule != "constant" else ""
    return ", ".join([*parts, f"{then}{config.schedule}{floor}{over}"])


# -- collecting --------------------------------------------------------------------------------------------------------


def seat(link: Link) -> Seat:
    name = "cpu" if link.device.type == "cpu" else precision.capabilities(link.device).name
    return Seat(link.hosts[link.world.rank], name, link.threads, link.threads_by)


def rank_line(link: Link) -> str:
    """Return the first line of a rank's log file."""
    world = link.world
    device = "cpu" if link.device.type == "cpu" else f"{link.device} ({seat(link).device})"
    return f"rank {world.rank} of {world.size}, {device}, {counted(link.threads, 'thread')}"


def data_facts(feed: Feed, epoch: int, length_unit: str = "") -> DataFacts:
    """Collect facts of a stage's data. All ranks must call it."""
    num_steps = feed.num_steps(epoch)
    if feed.is_stream:
        return DataFacts(None, num_steps, is_cut=feed.is_cut)
    plan, lengths = feed.plan(epoch), feed.lengths
    if lengths is None:
        return DataFacts(len(feed.data), num_steps, num_left_out=plan.num_left_out)
    # Lengths are what batches are made by; of data that may become longer on its way, only it knows how long it is.
    total = feed.traits.total_length
    total = float(lengths.sum(dtype=float)) if total is None else total
    left_out = plan.num_left_out
    return DataFacts(len(feed.data), num_steps, total, length_unit, plan.padding(), num_left_out=left_out)


def model_facts(stepper: Stepper) -> ModelFacts:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in stepper.model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    name, way = type(stepper.optimizer).__name__, getattr(stepper.optimizer, "way", None)
    return ModelFacts(sum(size for size, _ in sizes), trained, f"{name} (kernels: {way})" if way else name)


# -- settings without effect -------------------------------------------------------------------------------------------

_Row = tuple[str, tuple[str, ...], Callable[[Facts], bool]]
"""(reason, settings, test if they have no effect for this reason)"""


def _schedule_rows() -> Iterator[_Row]:
    """Options that not every schedule heeds, those of few schedules after the one of all that decay."""
    every = len(SCHEDULES) - 1  # but the constant one
    for option, names in sorted(schedule.users_of_options().items(), key=lambda item: len(item[1]) % every):
        words = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        reason = "with a constant schedule" if len(names) == every else f"unless the schedule is {words}"
        yield reason, (option,), partial(_is_idle_in_schedule, option)


def _is_idle_in_schedule(option: str, facts: Facts) -> bool:
    return not schedule.heeds(facts.config.schedule, option)


_NO_EFFECT: list[_Row] = [
    (
        "in a run that ends before that step",
        ("swa_start", "swa_every", "swa_lr", "swa_statistics"),
        lambda facts: (facts.config.swa_start or 0) > (facts.schedule_steps or math.inf),
    ),
    ("at a level that does not compile", ("compile_mode",), lambda facts: not facts.precision.compile),
    (
        "without validation sets",
        ("monitor", "patience", "monitor_mode", "eval_batch", "val_every_steps", "val_at_end"),
        lambda facts: not facts.validation,
    ),
    ("unless the optimizer is sgd or lars", ("momentum",), lambda facts: "momentum" in build.unused(facts.config)),
    ("with optimizer {optimizer}", ("betas",), lambda facts: "betas" in build.unused(facts.config)),
    (
        "unless the optimizer is muon",
        (
            "muon_match",
            "muon_convolutions",
            "muon_scale",
            "muon_momentum",
            "muon_steps",
            "muon_dtype",
            "adamw_lr",
        ),
        lambda facts: facts.config.optimizer != "muon",
    ),
    (
        "without `larc` or optimizer lars",
        ("larc_eta", "larc_exclude"),
        lambda facts: facts.config.larc is None and facts.config.optimizer != "lars",
    ),
    (
        "without `larc`",
        ("larc_epsilon", "larc_min_update", "larc_decay", "larc_zero"),
        lambda facts: facts.config.larc is None,
    ),
    *_schedule_rows(),
    (
        "unless the order is laplace or bucket",
        ("bins",),
        lambda facts: facts.config.order not in ("laplace", "bucket"),
    ),
    (
        "where every rank has the whole state: survivors go on without it",
        ("mirror",),
        lambda facts: facts.config.reduce == "grad" and facts.config.shard == "none",
    ),
    (
        "unless `reduce` is param",
        ("sync_step", "sync_seconds", "sync_state", "sync_overlap", "outer", "outer_lr", "outer_momentum"),
        lambda facts: facts.config.reduce != "param",
    ),
    (
        "unless `outer` is momentum or nesterov",
        ("outer_lr", "outer_momentum"),
        lambda facts: facts.config.reduce == "param" and facts.config.outer == "plain",
    ),
    (
        "with `reduce` param or a `wire` that rounds: results depend on the ranks",
        ("sums",),
        lambda facts: (
            (facts.config.reduce, facts.config.wire) != ("grad", "full")
            and "sums" in facts.config.model_fields_set
            and facts.config.sums == "exact"
        ),
    ),
    ("without `shard`", ("shard_modules", "checkpoint_form"), lambda facts: facts.config.shard == "none"),
    (
        "without `profile`",
        ("profile_ranks",),
        lambda facts: facts.config.profile == "no" and not facts.config.profile_memory,
    ),
    ("on one rank", ("reduce", "wire", "shard", "checkpoint_form"), lambda facts: not facts.reduces),
    ("without fp16", ("loss_scale",), lambda facts: not facts.precision.scaled),
    ("on a resumed run", ("init_from",), lambda facts: facts.resumed is not None),
    ("unless a run is resumed", ("regrain", "allow_change"), lambda facts: facts.resumed is None),
    ("because `out` names the folder", ("exp_name", "runs_dir"), lambda facts: _is_named_by_out(facts.config)),
    ("unless `save_every_steps` is auto", ("failures",), lambda facts: facts.config.save_every_steps != "auto"),
    (
        "without a run folder",
        ("save_every_steps", "checkpoint_form", "keep_last", "keep_best", "profile", "profile_memory"),
        lambda facts: facts.folder is None,
    ),
]


def _is_named_by_out(config: TrainConfig) -> bool:
    """Return True if the run's folder is another than `runs_dir` and `exp_name` would give."""
    if config.out is None:
        return False
    out, named = absolute(config.out), absolute(config.runs_dir / (config.exp_name or "_"))
    if config.exp_name is None:
        return out.parent != named.parent
    return out.parent != named.parent or re.fullmatch(rf"{re.escape(named.name)}(-\d+)?", out.name) is None


def idle(facts: Facts) -> list[str]:
    """Return a line per reason why settings that were changed have no effect in this run, each for its first reason."""
    config, fields = facts.config, type(facts.config).model_fields
    lines, reported = [], set[str]()
    for reason, names, applies in _NO_EFFECT:
        changed = [name for name in names if getattr(config, name) != fields[name].default and name not in reported]
        if changed and applies(facts):
            reported |= set(changed)
            words = " and ".join(f"`{name}`" for name in changed)
            reason = reason.format(optimizer=config.optimizer)
            lines.append(f"{words} {'has' if len(changed) == 1 else 'have'} no effect {reason}")
    if facts.folder is None and "tensorboard" in facts.config.loggers and "loggers" in facts.config.model_fields_set:
        lines.append("the logger tensorboard has no effect without a run folder")
    return lines
