"""Preparation of a model and its optimizer for training: both are changed in place, in a fixed order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.config.compared import shared_settings
from paceline.config.python_call import kind_of
from paceline.config.settings import EngineConfig
from paceline.core.errors import PacelineError, TaskContract, WrongType
from paceline.core.together import Exclusion
from paceline.core.torch_private import takes_amp_scaling
from paceline.core.units import counted
from paceline.data.grain import Batch
from paceline.observe.clock import Clock
from paceline.optim.build import zero_first_momentum
from paceline.optim.clip import ClipNorm
from paceline.optim.ema import WeightAverage
from paceline.optim.finite import FiniteCheck
from paceline.optim.layerwise import Layerwise
from paceline.optim.swa import StochasticAverage
from paceline.parallel.alone import Alone, AloneInTree
from paceline.parallel.averaged.strategy import Averaged
from paceline.parallel.batch_norm.per_step import StepStatistics
from paceline.parallel.batch_norm.shares import RunningStatistics
from paceline.parallel.batch_norm.synchronized import JoinedNorms
from paceline.parallel.sharded.blocks import Sharding, is_sharded
from paceline.parallel.strategy import Strategy
from paceline.parallel.summed import FastAdd, Summed
from paceline.parallel.tree.add import TreeAdd
from paceline.parallel.tree.all_reduce import TreeAllReduce
from paceline.parallel.tree.step_tree import tally_dtype
from paceline.speed import master, precision, recompute
from paceline.speed.compile import compile_in_place, compile_parts
from paceline.speed.loss_scale import LossScale
from paceline.speed.precision import Precision, check_layers
from paceline.train.grains import GrainPass, PlainPass, RecordedPass
from paceline.train.loss import NoGradients
from paceline.world.consistency import check_same
from paceline.world.link import Link
from paceline.world.start import patience

if TYPE_CHECKING:
    from paceline.parallel.sharded.shards import Shards


class DividesByZero(PacelineError):
    """fp16 state of an optimizer whose divisor is then 0 for small gradients: its first step gives inf and nan."""

    optimizer: str
    eps: float
    excludes = (
        Exclusion(
            "`--precision fp16-pure`",
            "an optimizer of torch whose `eps` is 0 in fp16, as that of `--optimizer adam` and `adamw` is",
            "mathematics",
            "It divides by a mean of squares: in fp16 the square of a gradient below 0.008 adds nothing to it, and "
            "`eps`, which keeps it from 0, is 0. LAMB and NovoGrad keep their state in fp32.",
        ),
    )
    sentence = "with `precision` fp16-pure {optimizer} divides by 0: squares of gradients and its eps, {eps:g}, vanish"
    hint = "use `--precision fp16-master`, or `--optimizer lamb`, `novograd` or `sgd`"


class BesideInSteps(PacelineError):
    """Modules beside a model, on ranks that do not sum statistics in every step."""

    excludes = (
        Exclusion(
            "`beside` of `Engine.prepare`",
            "`--sums fast`, `--reduce param` or `--wire` on several ranks",
            "mathematics",
            "There each rank keeps a share of a model's batch-norm statistics, of which only one engine can know.",
        ),
    )
    sentence = "`beside` needs batch-norm statistics that are summed in every step, and these settings do not"
    hint = "leave out `sums`, `reduce` and `wire`, or use modules without batch norm"


@dataclass(frozen=True)
class Prepared:
    """A model and its optimizer at work on this rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    """Way in which the ranks come to one model."""
    statistics: RunningStatistics
    """Batch-norm statistics, shared out over the ranks while they train."""
    masters: master.Masters | None
    """fp32 masters of fp16 weights."""
    shards: Shards | None
    """This rank's pieces of a sharded model."""
    average: WeightAverage | None
    """Moving average (`ema`) or mean (`swa_start`) of the weights."""
    norms: JoinedNorms | None
    """Batch norms that are joined over ranks (`sync_batchnorm`)."""
    input_cast: RemovableHandle | None
    plain: PlainPass
    """Forward and backward of a grain as PyTorch does it."""
    autocast: Callable[[], AbstractContextManager[Any]]
    updated: list[Tensor]
    """Tensors that the optimizer updates."""
    clip_norm: ClipNorm | None
    finite: FiniteCheck
    skips_on_device: bool
    """The optimizer itself leaves the weights alone if its `found_inf` says so; the host does not wait."""
    grains: GrainPass
    """Forward and backward of the grains of a step: `plain`, or `recorded`."""
    beside: Sequence[torch.nn.Module] = ()
    """Modules that a loss runs beside the model."""
    recorded: RecordedPass | None = None
    """CUDA graphs of grains, where `-O4` has chosen them."""

    def begin_step(self, batch: Batch) -> None:
        self.strategy.begin(batch)
        self.grains.begin_step(self.strategy.divisor(batch), len(batch.grains))
        self.statistics.begin_step(batch.num_grains)
        if self.norms is not None:
            self.norms.begin_step(batch)

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Grains that are run in here change no buffer of the model; gradients are forgotten by the next step."""
        buffers = [buffer for module in (self.model, *self.beside) for buffer in module.buffers()]
        before = [buffer.clone() for buffer in buffers]
        with self.statistics.untraced():
            try:
                yield
            finally:
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer is about to use."""
        return [parameter.grad for parameter in self.updated if parameter.grad is not None]

    def named_weights(self) -> dict[str, Tensor]:
        """Return the weights by name as the optimizer has them: fp32 masters or this rank's shards, if there are."""
        return named_weights(self.model, self.masters, self.shards)

    def optimizer_names(self) -> dict[Tensor, str]:
        """Return the parameter's name for each tensor of the optimizer (a master or a shard stands for its weight)."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        if self.masters is not None:
            names.update({tensor: name for name, tensor in self.masters.tensors.items()})
        if self.shards is not None:
            names.update({tensor: name for name, tensor in self.shards.tensors.items()})
        return {parameter: names[parameter] for parameter in self.updated}

    def release(self) -> None:
        """Give the model back, so that it can be prepared again. The ranks must be together, the statistics total."""
        self.strategy.detach()
        if self.norms is not None:
            self.norms.detach()
        if self.input_cast is not None:
            self.input_cast.remove()
        if self.masters is not None:
            self.masters.release()


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    link: Link,
    chosen: Precision,
    scale: LossScale,
    *,
    clock: Clock | None = None,
    average: WeightAverage | None = None,
    beside: Sequence[torch.nn.Module] = (),
    shards: bool = True,
) -> Prepared:
    """Put a model and its optimizer to work on this rank. Both are changed in place and keep their names.

    `beside` are modules that a loss runs, too, and that this optimizer does not train. `average` is the moving average
    that goes on, if the model was prepared before. Without `shards` the model stays whole, because it will be released
    and prepared again before its first step, and sharding cannot be undone. All ranks must call it.
    """
    _check_pair(model, optimizer)
    _check_state(optimizer, chosen)
    check_layers(chosen, model, link.device)
    if link.has_group:
        check_same(link, shared_settings(config) | {"precision": chosen.name} | _facts(model, optimizer))
    # Where: everything below works on the device's tensors.
    model.to(link.device)
    norms = _join_norms(model, config, link)
    # What is kept of forward: recomputation wraps forwards, which the compiler is to see.
    if config.checkpoint_activations:
        recompute.recompute(model, config.checkpoint_activations)
    # Equal on all ranks, in the dtype that the model came in.
    _make_equal(model, link)
    sharding = _sharding(config, link, chosen) if shards else None
    # In which dtype: the optimizer gets the fp32 masters before anything counts on the tensors that it holds.
    masters = _cast(model, optimizer, chosen, sharding)
    is_fp32 = chosen.weights is torch.float32
    input_cast = None if is_fp32 else master.cast_inputs(model, chosen.weights)
    # Compiled: before sharding, whose hooks stay outside of the compiled blocks.
    if chosen.compile:
        _compile(model, config, sharding)
    # Sharded: from here on the optimizer holds shards, if there are any.
    pieces = None if sharding is None else _shard(model, optimizer, link, sharding)
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults.get("fused"):
        zero_first_momentum(optimizer)  # the only place: also for an optimizer that the user has made
    if isinstance(optimizer, Layerwise):
        optimizer.use_whole_vectors(sums_in_tree(config))
    # Reduced: last, because a strategy hooks and averages the tensors as they now are.
    before, average = average, _average(config, named_weights(model, masters, pieces))
    if average is not None:
        average.go_on_from(before)
    statistics = _choose_statistics(model, config, link, beside)
    num_statistics = statistics.num_numbers
    strategy = _choose_strategy(model, optimizer, config, link, masters, pieces, average, clock, num_statistics)
    statistics.share()
    autocast = precision.autocast(chosen, link.device)
    plain = PlainPass(scale, None if chosen.autocast is None else autocast, pieces is not None)
    return Prepared(
        model=model,
        optimizer=optimizer,
        strategy=strategy,
        statistics=statistics,
        masters=masters,
        shards=pieces,
        average=average,
        norms=norms,
        input_cast=input_cast,
        plain=plain,
        grains=plain,
        beside=beside,
        autocast=autocast,
        updated=[parameter for group in optimizer.param_groups for parameter in group["params"]],
        clip_norm=None if config.clip_norm is None else ClipNorm(config.clip_norm),
        finite=FiniteCheck(),
        skips_on_device=takes_amp_scaling(optimizer),
    )


def _make_equal(model: torch.nn.Module, link: Link) -> None:
    """Give all ranks the weights and buffers of the first. Shards are pieces of one model already."""
    for tensor in [*([] if is_sharded(model) else model.parameters()), *model.buffers()]:
        link.broadcast(tensor.data)


def _sharding(config: EngineConfig, link: Link, chosen: Precision) -> Sharding | None:
    """Return how the settings shard the model on these ranks; None: not at all."""
    if config.shard == "none" or not link.has_group:
        return None
    half = torch.float16 if chosen.master else None
    timeout = patience(config.timeout_s, link.device)
    return Sharding(config.shard_modules, config.shard == "node", config.wire, half, timeout, sums_in_tree(config))


def _shard(model: torch.nn.Module, optimizer: torch.optim.Optimizer, link: Link, sharding: Sharding) -> Shards:
    from paceline.parallel.sharded.fsdp import shard  # torch's sharding takes seconds to load

    return shard(model, optimizer, link, sharding)


def _cast(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, chosen: Precision, sharding: Sharding | None
) -> master.Masters | None:
    """Turn a model to the dtype that it computes in; return the masters of its weights, unless shards are masters."""
    if sharding is None or sharding.computed_in is None:
        return master.cast(model, optimizer, chosen)
    master.halve(model, weights=False)
    return None


def _compile(model: torch.nn.Module, config: EngineConfig, sharding: Sharding | None) -> None:
    """Compile a model as a whole, or block by block if it will be sharded; a sharded model has been compiled."""
    if sharding is None:
        compile_in_place(model, config.compile_mode)
    elif not is_sharded(model):
        compile_parts(model, sharding.units(model), config.compile_mode)


def named_weights(model: torch.nn.Module, masters: master.Masters | None, shards: Shards | None) -> dict[str, Tensor]:
    """Return the weights by name as the optimizer has them: fp32 masters or this rank's shards, if there are some."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if masters is not None:
        weights.update(masters.tensors)
    if shards is not None:
        weights.update(shards.tensors)
    return weights


def _check_pair(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer updates what the ranks keep equal: trainable parameters of this model."""
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        wrong = f"a model {kind_of(model)}"
        if isinstance(model, torch.nn.Module):
            wrong = f"an optimizer {kind_of(optimizer)}"
        raise WrongType(
            f"engine.prepare needs a model and its optimizer, and got {wrong}",
            hint="write `engine.prepare(model, torch.optim.AdamW(model.parameters()))`; models that take turns (a GAN) "
            "are two engines: docs/own-loop.md",
        )
    parameters = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_foreign = sum(id(parameter) not in parameters for parameter in updated)
    if num_foreign:
        raise TaskContract(
            f"the optimizer updates {counted(num_foreign, 'parameter')} that the model does not have",
            hint="make them part of the model (a criterion's parameters too), so that ranks and checkpoints have them",
        )
    # Of the class: schedulers put a function of their own into the object.
    _, *wanted = inspect.signature(type(optimizer).step).parameters.values()
    if any(each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in wanted):
        raise TaskContract(
            f"`{type(optimizer).__name__}.step` needs a closure that evaluates the model again, and a step here "
            "evaluates it once",
            hint="use an optimizer whose `step()` needs none, such as `--optimizer adamw`",
        )
    if not any(parameter.requires_grad for parameter in updated):
        raise NoGradients


def _check_state(optimizer: torch.optim.Optimizer, chosen: Precision) -> None:
    """Check that a state in the dtype of the weights has room for what the optimizer divides by."""
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.Adam)
    if chosen.weights is not torch.float16 or chosen.master or not is_torchs:
        return
    for group in optimizer.param_groups if "eps" in optimizer.defaults else ():
        if not torch.tensor(group["eps"], dtype=torch.float16, device="cpu"):
            raise DividesByZero(kind.__name__, group["eps"])


def _facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what all ranks must have alike of a model and its optimizer; values are made equal by `prepare`."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts: dict[str, Any] = {"number of the model's tensors": len(tensors), "optimizer": type(optimizer).__name__}
    for name, tensor in tensors:
        trained = "" if tensor.requires_grad else ", not trained"
        facts[f"{name} of the model"] = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{trained}"
    for number, group in enumerate(optimizer.param_groups):
        where = f" of the optimizer's group {number}" if len(optimizer.param_groups) > 1 else " of the optimizer"
        facts[f"number of tensors{where}"] = len(group["params"])
        facts |= {f"{name}{where}": value for name, value in group.items() if _is_plain(value)}
    return facts


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else [value]
    return all(each is None or isinstance(each, (bool, int, float, str)) for each in values)


def _join_norms(model: torch.nn.Module, config: EngineConfig, link: Link) -> JoinedNorms | None:
    """Join batch norms over groups of ranks, if the settings ask for it; all ranks must call it."""
    size, world = config.sync_batchnorm, link.world
    if size == "no" or not link.has_group:
        return None
    return JoinedNorms(model, world, world.size if size == "all" else size, patience(config.timeout_s, link.device))


def sums_in_tree(config: EngineConfig) -> bool:
    """Return True if sums over the grains of a step have one order on any number of ranks.

    Where ranks step apart, or numbers are rounded on the way, results depend on the ranks by nature.
    """
    return config.sums != "fast" and config.reduce == "grad" and config.wire == "full"


def _choose_statistics(
    model: torch.nn.Module, config: EngineConfig, link: Link, beside: Sequence[torch.nn.Module]
) -> RunningStatistics:
    if not sums_in_tree(config):
        if beside and link.has_group:
            raise BesideInSteps
        return RunningStatistics(model, link, are_shared_out=config.reduce != "param")
    return StepStatistics(model, link, tally_dtype(list(model.parameters())), beside)


def _average(config: EngineConfig, weights: Mapping[str, Tensor]) -> WeightAverage | None:
    if config.swa_start is not None:
        return StochasticAverage(weights, config.swa_start, config.swa_every)
    return WeightAverage(weights, config.ema) if config.ema else None


def _choose_strategy(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    link: Link,
    masters: master.Masters | None,
    shards: Shards | None,
    average: WeightAverage | None,
    clock: Clock | None,
    num_statistics: int,
) -> Strategy:
    """Return the strategy that the settings ask for on these ranks; all ranks must call it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_tree, timeout = sums_in_tree(config), patience(config.timeout_s, link.device)
    if not link.has_group:
        return AloneInTree(parameters) if in_tree else Alone(parameters)
    if shards is not None:
        from paceline.parallel.sharded.strategy import FastShardAdd, Sharded, TreeShardAdd

        if shards.steps is None:
            return Sharded(parameters, link, shards, FastShardAdd(shards, link), clock)
        all_reduce = TreeAllReduce(link.group, link.device, timeout)
        adder = TreeShardAdd(shards, shards.steps, all_reduce, tally_dtype(parameters), num_statistics)
        return Sharded(parameters, link, shards, adder, clock)
    if in_tree:
        all_reduce = TreeAllReduce(link.group, link.device, timeout)
        return Summed(parameters, link, TreeAdd(all_reduce, tally_dtype(parameters), num_statistics), clock=clock)
    if config.reduce == "grad":
        return Summed(parameters, link, FastAdd(link, config.wire), clock=clock)
    persistent = model.state_dict().keys()  # buffers that are not persistent are constants
    return Averaged(
        parameters,
        link,
        config,
        optimizer=optimizer,
        buffers={name: buffer for name, buffer in model.named_buffers() if name in persistent},
        weight_average=() if average is None else list(average.tensors.values()),
        timeout=timeout,
        weights_changed=(lambda: None) if masters is None else masters.push_weights,
        clock=clock,
    )
