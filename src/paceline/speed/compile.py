"""`torch.compile` as `compile_mode` asks for it, and what it has cost so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch

from paceline.core.torch_private import compile_counters

# Without CUDA graphs: they reuse the memory of outputs, which a step keeps until its last grain is done.
MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def compile_in_place(model: torch.nn.Module, mode: str) -> None:
    """Compile a model's forward; the model keeps its class and its names."""
    model.compile(mode=MODES[mode])


_compiled: WeakSet[torch.nn.Module] = WeakSet()
"""Modules whose forward is compiled by itself."""


def compile_parts(model: torch.nn.Module, cut: Collection[str], mode: str) -> None:
    """Compile a model whose modules `cut` are to be sharded: each by itself, and what lies between them.

    What brings weights together and lets them go is called around these modules, and stays outside of compiled code.
    """
    for name in compiled_parts(model, cut):
        module = model.get_submodule(name)
        if module not in _compiled:  # a model that is prepared again
            module.forward = torch.compile(_own_function(module.forward, name), mode=MODES[mode])
            _compiled.add(module)


def compiled_parts(model: torch.nn.Module, cut: Collection[str]) -> list[str]:
    """Return the names of the largest modules with parameters that have no module of `cut` inside of them."""
    return list(_parts(model, "", [name for name in cut if name]))


def _parts(module: torch.nn.Module, name: str, cut: Collection[str]) -> Iterator[str]:
    if next(module.parameters(), None) is None:
        return
    prefix = f"{name}." if name else ""
    is_called = type(module).forward is not torch.nn.Module.forward
    if is_called and not any(other.startswith(prefix) for other in cut):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _parts(child, prefix + child_name, cut)


def _own_function(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the same function with code of its own: the compiler counts recompiles, and which sizes change, by code.

    Blocks of one class have the code of one forward, whose limit of recompiles would be spent by their shapes.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    code = call.__code__.replace(co_name=f"forward of {name or 'the model'}")
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


@dataclass(frozen=True)
class Compiled:
    """Cost of compiling, since the process began or between two readings."""

    recompiles: int = 0
    """Times that code was compiled for other shapes or values than before; the first time of each is none."""
    seconds: float = 0.0

    def since(self, earlier: Compiled) -> Compiled:
        return Compiled(self.recompiles - earlier.recompiles, self.seconds - earlier.seconds)


def compiled_so_far() -> Compiled:
    """Return what this process has compiled again, and the seconds that all compiling took."""
    counters = compile_counters()
    return Compiled(counters.recompiles, counters.seconds)
