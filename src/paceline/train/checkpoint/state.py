"""What a checkpoint holds of an engine: weights, buffers, optimizer, loss scale, average (there is no random state)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.optim import state as optimizer_state
from paceline.parallel.averaged import Averaged
from paceline.train.engine import Engine

Parts = dict[str, dict[str, Tensor]]


class WeightsMisfit(PacelineError):
    """The checkpoint is of another model."""

    hint = "resume with the model of the run, or start a new run with `init_from` to take what fits"

    def __init__(self, problems: list[str]) -> None:
        shown = "\n".join(f"  {problem}" for problem in problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        super().__init__(f"the checkpoint does not fit this model:\n{shown}{more}")
        self.problems = problems


class RanksHaveTheirOwn(PacelineError):
    """Every rank kept its own optimizer state, and there are not as many ranks as there were."""

    hint = "use as many ranks, or add `--sync-state average --allow-change` (or `reset`) to go on with another number"

    def __init__(self, before: int, now: int) -> None:
        super().__init__(
            f"the checkpoint has the optimizer states of {before} ranks (`sync_state` keep), here are {now}"
        )


RANK = "rank-"
"""Parts of a checkpoint with what only that rank had (`reduce: param`)."""


SHARDED: dict[str, Callable[[str], str]] = {"model": str, "optimizer": optimizer_state.parameter_of, "ema": str}
"""Parts of which a rank has only its shards (`shard: full`), and of which parameter an entry is."""


def collect(engine: Engine, in_pieces: bool = False) -> tuple[Parts, dict[str, Any]]:
    """(tensors by part, plain values). Batch-norm statistics must be complete: see `RunningStatistics.total`.

    With `shard: full` all ranks must call it, and only the first gets everything; `in_pieces` leaves every rank its
    own pieces, and nobody needs room for more.
    """
    model = {**dict(engine.model.named_buffers()), **engine.named_weights()}
    kept = engine.model.state_dict().keys()  # leaves out buffers that are not persistent
    optimizer, optimizer_values = optimizer_state.pack(engine.optimizer, names(engine))
    parts: Parts = {
        "model": {name: tensor.detach() for name, tensor in model.items() if name in kept},
        "optimizer": optimizer,
        "scale": engine.scale.state_dict(),
    }
    if engine.average is not None:
        parts["ema"] = engine.average.state_dict()
    if engine.shards is not None and not in_pieces:
        parts |= {part: engine.shards.whole(parts[part], of) for part, of in SHARDED.items() if part in parts}
    averaging: dict[str, Any] = {}
    if isinstance(engine.strategy, Averaged):
        velocities, averaging = engine.strategy.common_state()
        if velocities:
            parts["outer"] = velocities
    values = {
        "num_steps": engine.num_steps,
        "batches": [engine.epoch, engine.epoch_step, engine.call_began],
        "skips": engine.skips.state(),
        "optimizer": optimizer_values,
        "averaging": averaging,
    }
    return parts, values


def is_piece(engine: Engine, part: str, name: str, tensor: Tensor) -> bool:
    """Whether an entry of a part is this rank's piece of a tensor, as `Shards.whole` would join it."""
    of = SHARDED.get(part)
    return engine.shards is not None and of is not None and tensor.ndim > 0 and of(name) in engine.shards.tensors


def collect_own(engine: Engine) -> dict[str, Tensor]:
    """What only this rank has: nothing, unless ranks step apart (`reduce: param`). Ranks must be together."""
    if not isinstance(engine.strategy, Averaged):
        return {}
    parts = {"averaging": engine.strategy.local_state(), "scale": engine.scale.state_dict()}
    parts["skips"] = {"state": torch.tensor(engine.skips.state())}
    if engine.config.sync_state == "keep":
        parts["optimizer"], _ = optimizer_state.pack(engine.optimizer, names(engine))
    return {f"{part}:{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def carried(engine: Engine) -> tuple[Parts, dict[str, Any]]:
    """What `restore` takes to go on after the model was released and prepared anew, on this very rank.

    For a model that is whole on every rank. All ranks must call it.
    """
    engine.sync()
    engine.statistics.total()
    parts, values = collect(engine)
    parts["model"] = {name: tensor.clone() for name, tensor in parts["model"].items()}  # the model itself goes on
    if engine.averages:
        world, own = engine.link.world, collect_own(engine)
        parts |= {f"{RANK}{number}": own if number == world.rank else {} for number in range(world.size)}
    engine.statistics.share()
    return parts, values


@torch.no_grad()
def restore(engine: Engine, parts: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
    """The counterpart of `collect`, into a prepared engine; parts named `rank-0` and so on are from `collect_own`."""
    own, optimizer = _own_parts(engine, parts)
    restore_weights(engine, parts["model"])
    average = parts.get("ema")
    if engine.shards is not None:
        optimizer = engine.shards.pieces(optimizer, SHARDED["optimizer"])
        average = average and engine.shards.pieces(average)
    optimizer_state.unpack(engine.optimizer, names(engine), optimizer, values["optimizer"])
    engine.scale.load_state_dict(own.get("scale") or parts["scale"])
    if engine.average is not None:
        # A run that had no average (changed settings) begins it with the weights as they are.
        engine.average.load_state_dict(average or engine.named_weights())
    engine.resume_at(values["num_steps"], values["batches"])
    engine.skips.load(own["skips"]["state"].tolist() if own else values["skips"])
    if isinstance(engine.strategy, Averaged):
        engine.strategy.load(parts.get("outer", {}), values.get("averaging", {}), own.get("averaging"))


def _own_parts(engine: Engine, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Parts, Mapping[str, Tensor]]:
    """(what this rank had, the optimizer state it goes on with)."""
    ranks: list[Parts] = []
    for number in range(sum(part.startswith(RANK) for part in parts)):
        split: Parts = {}
        for key, tensor in parts[f"{RANK}{number}"].items():
            part, _, name = key.partition(":")
            split.setdefault(part, {})[name] = tensor
        ranks.append(split)
    if not ranks:
        return {}, parts["optimizer"]
    world, averages = engine.link.world, isinstance(engine.strategy, Averaged)
    is_kept = any("optimizer" in each for each in ranks)
    own = ranks[world.rank] if averages and len(ranks) == world.size else {}
    # One rank does not average, and a run may go on with `grad`: the states of all are still what it goes on from.
    policy = engine.config.sync_state if engine.config.reduce == "param" else "average"
    if not is_kept or policy == "reset":
        return own, parts["optimizer"]
    if policy == "keep":
        if not own:
            raise RanksHaveTheirOwn(len(ranks), world.size)
        return own, own.get("optimizer", {})
    states = [each.get("optimizer", {}) for each in ranks]
    return own, {name: _mean([each[name] for each in states if name in each]) for name in parts["optimizer"]}


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


@torch.no_grad()
def restore_weights(engine: Engine, saved: Mapping[str, Tensor]) -> None:
    """Weights and buffers, all of them; the statistics become totals and are shared out anew."""
    engine.statistics.total()
    own = {**dict(engine.model.named_buffers()), **engine.named_weights()}
    kept = engine.model.state_dict().keys()
    problems = [f"{name}: not in the checkpoint" for name in kept if name in own and name not in saved]
    problems += [f"{name}: not in the model" for name in saved if name not in own]
    shapes = {name: tensor.shape for name, tensor in own.items()}
    if engine.shards is not None:
        shapes |= engine.shards.shapes()
    for name in own.keys() & saved.keys():
        if shapes[name] != saved[name].shape:
            problems.append(f"{name}: {list(saved[name].shape)} there, {list(shapes[name])} here")
    if problems:
        raise WeightsMisfit(sorted(problems))
    for name, tensor in (saved if engine.shards is None else engine.shards.pieces(saved)).items():
        own[name].copy_(tensor)
    if engine.masters is not None:
        engine.masters.push_weights()
    engine.statistics.share()


def names(engine: Engine) -> dict[Tensor, str]:
    """Which parameter each tensor of the optimizer is (a master or a shard stands for its weight)."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in engine.model.named_parameters()}
    if engine.masters is not None:
        names.update({tensor: name for name, tensor in engine.masters.tensors.items()})
    if engine.shards is not None:
        names.update({tensor: name for name, tensor in engine.shards.tensors.items()})
    return {parameter: names[parameter] for group in engine.optimizer.param_groups for parameter in group["params"]}
