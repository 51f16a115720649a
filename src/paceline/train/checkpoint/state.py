"""State of a stepper in a checkpoint: weights, buffers, optimizer, loss scale, average (there is no random state)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.optim import state as optimizer_state
from paceline.parallel.strategy import StrategyState
from paceline.train.stepper import Stepper
from paceline.world.discover.environment import World

Parts = dict[str, dict[str, Tensor]]


class WeightsMisfit(PacelineError):
    """The checkpoint is of another model."""

    problems: list[str]
    sentence = "the checkpoint does not fit this model:\n{shown}"
    hint = "resume with the model of the run, or start a new run with `init_from` to take what fits"

    @property
    def shown(self) -> str:
        lines = [f"  {problem}" for problem in self.problems[:10]]
        more = [f"  and {len(self.problems) - 10} more"] if len(self.problems) > 10 else []
        return "\n".join(lines + more)


class RanksHaveTheirOwn(PacelineError):
    """Every rank kept its own optimizer state, and there are not as many ranks as there were."""

    before: int
    now: int
    excludes = (
        Exclusion(
            "`--sync-state keep`",
            "`--resume` on another number of ranks",
            "mathematics",
            "Every rank has its own optimizer state, and there are more or fewer ranks than states.",
        ),
    )
    sentence = "the checkpoint has the optimizer states of {before:#rank} (`sync_state` keep), here are {now}"
    hint = "use as many ranks, or add `--sync-state average --allow-change` (or `reset`) to go on with another number"


RANK = "rank-"
"""Prefix of the parts of a checkpoint that only one rank had (`reduce: param`)."""


STATISTICS = "statistics"
"""Part of a checkpoint with all ranks' shares of batch-norm statistics, as `rank/buffer`; their sum is in `model`."""


SHARDED: dict[str, Callable[[str], str]] = {"model": str, "optimizer": optimizer_state.parameter_of, "ema": str}
"""Parts of which a rank has only its shards (`shard`), and the parameter that an entry belongs to."""


@dataclass(frozen=True)
class EngineParts:
    """Tensors of a stepper by part, in the order of a checkpoint. Fields without a default are in every checkpoint."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    scale: dict[str, Tensor]
    ema: dict[str, Tensor] = field(default_factory=dict)
    schedulers: dict[str, Tensor] = field(default_factory=dict)
    outer: dict[str, Tensor] = field(default_factory=dict)

    def by_name(self) -> Parts:
        """Return the parts that exist."""
        always = required(type(self))
        return {name: tensors for name, tensors in vars(self).items() if tensors or name in always}


def required(record: type) -> set[str]:
    """Return the names of a dataclass's fields without a default."""
    return {each.name for each in fields(record) if each.default is each.default_factory is MISSING}


def collect(engine: Stepper, in_pieces: bool = False) -> tuple[Parts, dict[str, Any]]:
    """Return (tensors by part, plain values). Statistics must be complete: see `Stepper.whole_statistics`.

    With `shard` all ranks must call it, and only the first gets everything; `in_pieces` leaves every rank its
    own pieces, and nobody needs room for more.
    """
    prepared = engine.prepared
    model = {**dict(prepared.model.named_buffers()), **prepared.named_weights()}
    persistent = prepared.model.state_dict().keys()  # leaves out buffers that are not
    optimizer, optimizer_values = optimizer_state.pack(prepared.optimizer, prepared.optimizer_names())
    strategy = prepared.strategy.state()
    parts = EngineParts(
        model={name: tensor.detach() for name, tensor in model.items() if name in persistent},
        optimizer=optimizer,
        scale=engine.scale.state_dict(),
        ema={} if prepared.average is None else prepared.average.state_dict(),
        schedulers=engine.schedulers.state(),
        outer=dict(strategy.common),
    ).by_name()
    if prepared.shards is not None and not in_pieces:
        parts |= {part: prepared.shards.whole(parts[part], of) for part, of in SHARDED.items() if part in parts}
    values = {
        "num_steps": engine.num_steps,
        "skips": engine.skips.state(),
        "optimizer": optimizer_values,
        "averaging": dict(strategy.values),
    }
    return parts, values


def is_piece(engine: Stepper, part: str, name: str, tensor: Tensor) -> bool:
    """Return True if an entry of a part is this rank's piece of a tensor, as `Shards.whole` would join it."""
    of, shards = SHARDED.get(part), engine.prepared.shards
    return shards is not None and of is not None and tensor.ndim > 0 and of(name) in shards.tensors


def collect_own(engine: Stepper) -> dict[str, Tensor]:
    """Return what only this rank has: nothing, unless ranks step apart (`reduce: param`). They must be together."""
    prepared = engine.prepared
    local = prepared.strategy.state().local
    if local is None:
        return {}
    parts = {"averaging": dict(local), "scale": engine.scale.state_dict()}
    parts["skips"] = {"state": torch.tensor(engine.skips.state(), device="cpu")}
    if engine.config.sync_state == "keep":
        parts["optimizer"], _ = optimizer_state.pack(prepared.optimizer, prepared.optimizer_names())
    return {f"{part}:{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def carried(engine: Stepper) -> tuple[Parts, dict[str, Any]]:
    """Return what `restore` needs to go on after the model was released and prepared again, on this rank.

    For a model that is whole on every rank. All ranks must call it.
    """
    with engine.whole_statistics():
        parts, values = collect(engine)
        parts["model"] = {name: tensor.clone() for name, tensor in parts["model"].items()}  # the model itself goes on
        own, world = collect_own(engine), engine.link.world
        if own:
            parts |= {f"{RANK}{number}": own if number == world.rank else {} for number in range(world.size)}
    return parts, values


@torch.no_grad()
def restore(engine: Stepper, parts: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
    """Restore what `collect` returned into a stepper with a prepared model; parts `rank-N` are from `collect_own`."""
    prepared = engine.prepared
    own, optimizer = _own_parts(engine, parts)
    restore_weights(engine, parts["model"])
    average = parts.get("ema")
    if prepared.shards is not None:
        optimizer = prepared.shards.pieces(optimizer, SHARDED["optimizer"])
        average = average and prepared.shards.pieces(average)
    optimizer_state.unpack(prepared.optimizer, prepared.optimizer_names(), optimizer, values["optimizer"])
    engine.schedulers.load(parts.get("schedulers", {}))
    engine.scale.load_state_dict(own.get("scale") or parts["scale"])
    if prepared.average is not None:
        # A run that had no average (changed settings) begins it with the weights as they are.
        prepared.average.load_state_dict(average or prepared.named_weights())
    engine.resume_at(values["num_steps"])
    engine.skips.load(own["skips"]["state"].tolist() if own else values["skips"])
    prepared.statistics.load(_share_of(engine.link.world, parts.get(STATISTICS, {})))
    prepared.strategy.load(StrategyState(parts.get("outer", {}), values.get("averaging", {}), own.get("averaging")))


def pack_shares(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the part `STATISTICS` of the shares of all ranks."""
    return {f"{rank}/{name}": tensor for rank, shares in enumerate(ranks) for name, tensor in shares.items()}


def _share_of(world: World, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a rank's share of the statistics; empty if the number of ranks was another: their sum is shared out."""
    by_rank: Parts = {}
    for key in part:
        rank, _, name = key.partition("/")
        by_rank.setdefault(rank, {})[name] = part[key]
    return by_rank[str(world.rank)] if by_rank.keys() == {str(rank) for rank in range(world.size)} else {}


def _own_parts(engine: Stepper, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Parts, Mapping[str, Tensor]]:
    """Return (what this rank had, the optimizer state that it goes on with)."""
    ranks: list[Parts] = []
    for number in range(sum(part.startswith(RANK) for part in parts)):
        split: Parts = {}
        for key, tensor in parts[f"{RANK}{number}"].items():
            part, _, name = key.partition(":")
            split.setdefault(part, {})[name] = tensor
        ranks.append(split)
    if not ranks:
        return {}, parts["optimizer"]
    has_optimizers = any("optimizer" in each for each in ranks)
    own = engine.prepared.strategy.own_part(ranks) or {}
    # One rank does not average, and a run may go on with `grad`: the states of all are still what it goes on from.
    policy = engine.config.sync_state if engine.config.reduce == "param" else "average"
    if not has_optimizers or policy == "reset":
        return own, parts["optimizer"]
    if policy == "keep":
        if not own:
            raise RanksHaveTheirOwn(len(ranks), engine.link.world.size)
        return own, own.get("optimizer", {})
    states = [each.get("optimizer", {}) for each in ranks]
    return own, {name: _mean([each[name] for each in states if name in each]) for name in parts["optimizer"]}


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


@torch.no_grad()
def restore_weights(engine: Stepper, saved: Mapping[str, Tensor]) -> None:
    """Restore all weights and buffers; batch-norm statistics become totals and are shared out again."""
    prepared = engine.prepared
    prepared.statistics.total()
    tensors = {**dict(prepared.model.named_buffers()), **prepared.named_weights()}
    persistent = prepared.model.state_dict().keys()
    problems = [f"{name}: not in the checkpoint" for name in persistent if name in tensors and name not in saved]
    problems += [f"{name}: not in the model" for name in saved if name not in tensors]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if prepared.shards is not None:
        shapes |= prepared.shards.shapes()
    for name in tensors.keys() & saved.keys():
        if shapes[name] != saved[name].shape:
            problems.append(f"{name}: {list(saved[name].shape)} there, {list(shapes[name])} here")
    if problems:
        raise WeightsMisfit(sorted(problems))
    for name, tensor in (saved if prepared.shards is None else prepared.shards.pieces(saved)).items():
        tensors[name].copy_(tensor)
    if prepared.masters is not None:
        prepared.masters.push_weights()
    prepared.statistics.share()
