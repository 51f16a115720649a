"""Activation checkpointing by module name: memory for time, with the same numbers.

A chosen module keeps only its inputs in forward and runs again in backward. Dropout draws the same numbers the second
time, and batch-norm running statistics see each batch once.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import NotFound
from paceline.core.torch_private import BatchNorm


def recompute(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Recompute the activations of every module whose name matches a pattern; returns the names chosen.

    Only the outermost matches are chosen: inside them everything is recomputed already, and `blocks.*` would otherwise
    take `blocks.0` and again `blocks.0.conv`. A container that is never called (ModuleList) stands for its children.
    """
    patterns = tuple(patterns)
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = ", ".join(_nearest(pattern, names))
            raise NotFound(
                f"checkpoint_activations: {pattern!r} matches no module of the model",
                hint=f"nearest module names: {nearest}" if nearest else "the model has no submodules",
            )
    chosen = dict(_outermost(model, "", patterns))
    for module in chosen.values():
        if not isinstance(module.forward, _Recomputed):
            module.forward = _Recomputed(module, module.forward)
    return list(chosen)


def _outermost(
    parent: nn.Module, prefix: str, patterns: tuple[str, ...], is_matched: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in parent.named_children():
        name = prefix + child_name
        child_matched = is_matched or any(fnmatchcase(name, pattern) for pattern in patterns)
        if child_matched and type(child).forward is not nn.Module.forward:
            yield name, child
        else:
            yield from _outermost(child, f"{name}.", patterns, child_matched)


class _Recomputed:
    """A module's forward that is run again in backward. An object, not a closure, so that models can be deep-copied."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # Dynamo takes no context function and needs none: a compiled graph writes each buffer back once.
            return checkpoint(self._forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
        return checkpoint(
            self._forward, *args, use_reentrant=False, preserve_rng_state=True, context_fn=self._contexts, **kwargs
        )

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), _spare_statistics(self._module)


@contextlib.contextmanager
def _spare_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch norms update copies of their buffers, which are then thrown away.

    Switching `track_running_stats` off instead would save other tensors than the first forward did, which
    torch.utils.checkpoint refuses.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    statistics = [(layer, name, buffer) for layer in layers for name, buffer in layer.named_buffers(recurse=False)]
    for layer, name, buffer in statistics:
        setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, name, buffer in statistics:
            setattr(layer, name, buffer)


def _nearest(pattern: str, names: list[str]) -> list[str]:
    return difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.0)
