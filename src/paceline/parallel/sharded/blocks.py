"""Blocks of a sharded model whose parameters are gathered together, and checks for what cannot be sharded.

These are pure decisions. `fsdp.py` applies them; it imports torch's FSDP, which takes seconds, and is therefore only
imported by runs that shard.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from types import MethodType

import torch
from torch import nn

from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.core.torch_private import BatchNorm

MIN_BLOCK = 2**16
"""Parameters of the smallest block that is gathered separately: below, latency costs more than the memory saved."""
MAX_SHARE = 0.25
"""A block with a larger share of the model than this is searched for smaller blocks."""
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
"""Elementwise optimizers of torch."""


class CannotShard(PacelineError):
    """The model or its optimizer cannot be sharded."""

    excludes = (
        Exclusion(
            "`--shard full`, `--shard node`",
            "an optimizer that needs whole tensors and does not say how",
            "mathematics",
            "A rank has a piece of each tensor. The optimizers of this library are given the norms of whole tensors; "
            "others say `is_elementwise` if pieces are enough.",
        ),
        Exclusion(
            "`--shard full`, `--shard node`",
            "a stage that changes the shape of the model",
            "mathematics",
            "Pieces of the old weights are on all ranks, and no rank has a whole model that could be changed.",
        ),
        Exclusion(
            "`--shard full`, `--shard node`",
            "a parameter without dimensions, or one that is part of two blocks",
            "mathematics",
            "Pieces are rows, and a parameter is gathered with one block.",
        ),
    )
    hint = "train with `--shard none`"

    def __init__(self, why: str, hint: str | None = None) -> None:
        super().__init__(f"`shard` is set, but {why}")
        self.hint = hint or self.hint


class CalledAround(PacelineError):
    """A loss used weights of a sharded model that were not gathered."""

    error: str
    """Message of torch."""
    sentence = "a part of the sharded model was called on its own ({first_line})"
    hint = "call the model itself in the loss, `model(x)`, not its layers or methods; or train with `--shard none`"

    @property
    def first_line(self) -> str:
        return self.error.splitlines()[0]


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded."""

    patterns: tuple[str, ...] = ()
    """Names of the modules that are gathered separately, as in `shard_modules`."""
    per_machine: bool = False
    """Shard over the ranks of each machine instead of over all ranks."""
    wire: str = "full"
    """Format in which gradients are sent."""
    computed_in: torch.dtype | None = None
    """Dtype in which weights are gathered, except those of batch norms; None: that of the pieces."""
    timeout: timedelta = timedelta(minutes=30)
    """Timeout of collectives inside a machine and between machines."""
    is_exact: bool = False
    """Add gradients in the order of the tree (`sums: exact`)."""

    def units(self, model: nn.Module) -> list[str]:
        """Return the names of the modules that are gathered separately: blocks, and norms of another dtype."""
        apart = [name for name, module in model.named_modules() if self.computed_in and is_norm(module)]
        return list(dict.fromkeys([*blocks(model, self.patterns), *apart]))


@contextmanager
def called_whole(has_shards: bool) -> Iterator[None]:
    """Raise `CalledAround` if a loss uses a piece of a weight instead of the gathered weight."""
    try:
        yield
    except RuntimeError as error:
        if not has_shards or not any(word in str(error) for word in ("DTensor", "FSDP")):
            raise
        raise CalledAround(str(error)) from error


def blocks(model: nn.Module, patterns: Iterable[str] = ()) -> list[str]:
    """Return the names of the modules whose parameters are gathered together; others are gathered with the model.

    Blocks are the modules that match `patterns`, by default the large children of `Sequential` and `ModuleList`. A
    match that is never called (`ModuleList`) is replaced by its children. Nothing inside a module whose forward was
    replaced (the kernels of `-O4`) is a block: such a forward reads the weights of its children directly.
    """
    patterns = tuple(patterns)
    if not patterns:
        return _large(model, "", MAX_SHARE * _size(model))
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in modules if fnmatchcase(name, pattern)]
        if not matches:
            nearest = difflib.get_close_matches(pattern.strip("*."), list(modules), n=3, cutoff=0.0)
            why = f"`shard_modules` {pattern!r} matches no module of the model"
            raise CannotShard(why, f"nearest module names: {', '.join(nearest) or 'the model has none'}")
        for name in matches:
            children = [f"{name}.{child}" for child, _ in modules[name].named_children()]
            chosen |= dict.fromkeys([name] if is_called(modules[name]) else children)
    fused = [name for name, module in model.named_modules() if _calls_around(module)]
    inside = {name for name in chosen for outer in fused if not outer or name.startswith(f"{outer}.")}
    return [name for name in modules if name in chosen and name not in inside and _size(modules[name])]


def _large(parent: nn.Module, prefix: str, too_large: float) -> list[str]:
    names: list[str] = []
    for child_name, child in () if _calls_around(parent) else parent.named_children():
        name, size = prefix + child_name, _size(child)
        is_block = isinstance(parent, nn.Sequential | nn.ModuleList) and is_called(child) and size >= MIN_BLOCK
        if is_block:
            names.append(name)
        if not is_block or size > too_large:
            names += _large(child, f"{name}.", too_large)
    return names


def is_called(module: nn.Module) -> bool:
    """Return True if the module has a forward; `ModuleList` does not."""
    return type(module).forward is not nn.Module.forward


def _calls_around(module: nn.Module) -> bool:
    """Return True if the forward of the module was replaced by one that need not call its children."""
    return isinstance(vars(module).get("forward"), MethodType)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check(model: nn.Module, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Raise `CannotShard` if the model or the optimizer cannot be sharded; nothing is changed."""
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.") and kind.__name__ in ELEMENTWISE
    if not is_torchs and not getattr(kind, "is_elementwise", False) and not hasattr(kind, "use_shards"):
        why = f"{kind.__name__} may need whole tensors, of which a rank has a piece"
        hint = "use an optimizer of ours, sgd, adam or adamw; if it treats every element alone, give its class "
        raise CannotShard(why, hint + "`is_elementwise = True`")
    if optimizer.state:
        raise CannotShard("the optimizer has made steps already", "prepare it before its first step")
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.ndim == 0:
            raise CannotShard(f"parameter {name!r} is a single number", f"give {name!r} the shape (1,)")
    dtypes = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
    if len(dtypes) > 1:
        raise CannotShard(f"its parameters are of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    homes: dict[int, tuple[str, str]] = {}
    inner_first = sorted(names, key=lambda name: -name.count("."))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = next((block for block in inner_first if name.startswith(f"{block}.")), "")
        first, other = homes.setdefault(id(parameter), (home, name))
        if first != home:
            why = f"{other!r} and {name!r} are one parameter in two blocks"
            raise CannotShard(why, "name blocks with `--shard-modules` so that both are in one, or outside of all")


def is_norm(module: nn.Module) -> bool:
    """Return True for a batch norm with parameters, which stay fp32 if other weights are fp16."""
    return isinstance(module, BatchNorm) and _size(module) > 0


def is_sharded(model: nn.Module) -> bool:
    """Return True if the model was sharded by `fsdp.shard`."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    return sharding is not None and isinstance(model, sharding.FSDPModule)
