"""fp16 weights: with fp32 masters that the optimizer updates (Apex O2), or all the way (Apex O3).

A step with masters is: forward and backward in fp16, `pull_gradients`, unscale and optimizer in fp32, `push_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.torch_private import BatchNorm, foreach_copy_
from paceline.speed.precision import Precision


class Masters:
    """fp32 masters of a model's fp16 weights.

    Turns the model to fp16 in place, except batch norm, whose sums need fp32; the optimizer then holds the masters in
    place of the fp16 weights, with the state it had for them. Build it after the optimizer and before any wrapper.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        batch_norm_ids = _batch_norm_parameters(model)
        names = {name: weight for name, weight in model.named_parameters() if _is_half_to_be(weight, batch_norm_ids)}
        self.tensors: dict[str, Tensor] = {name: weight.detach().float().clone() for name, weight in names.items()}
        """Name of a weight in the model -> its fp32 master, what a checkpoint stores. Frozen weights have one too."""
        self._weights: list[Tensor] = list(names.values())
        self._masters = list(self.tensors.values())
        halve(model)
        self._trained = [
            (weight, master)
            for weight, master in zip(self._weights, self._masters, strict=True)
            if weight.requires_grad
        ]
        self._buffers = [torch.zeros_like(master) for _, master in self._trained]
        self._model = model
        self._optimizer = optimizer
        _replace(optimizer, self._weights, self._masters)

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """fp16 gradients of the model -> fp32 gradients of the masters; where there is none, none."""
        sources, targets = [], []
        for (weight, master), buffer in zip(self._trained, self._buffers, strict=True):
            if weight.grad is None:
                master.grad = None
            else:
                master.grad = buffer
                sources.append(weight.grad)
                targets.append(buffer)
        if sources:
            foreach_copy_(targets, sources)

    @torch.no_grad()
    def push_gradients(self) -> None:
        """fp32 gradients of the masters -> fp16 gradients of the model, for somebody who wants to look or change."""
        pairs = [(weight.grad, buffer) for (weight, _), buffer in zip(self._trained, self._buffers, strict=True)]
        known = [(gradient, buffer) for gradient, buffer in pairs if gradient is not None]
        if known:
            foreach_copy_([gradient for gradient, _ in known], [buffer for _, buffer in known])

    @torch.no_grad()
    def pull_changes(self) -> None:
        """After `push_gradients`: take over what was changed since; what was not keeps its fp32 digits."""
        for (weight, _), buffer in zip(self._trained, self._buffers, strict=True):
            if weight.grad is not None:
                buffer.copy_(torch.where(weight.grad == buffer.to(weight.grad.dtype), buffer, weight.grad.float()))

    @torch.no_grad()
    def push_weights(self) -> None:
        """fp32 masters -> fp16 weights of the model."""
        if self._weights:
            foreach_copy_(self._weights, self._masters)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the masters found under their names, and round the model's weights from all of them.

        Names that are no master (batch norm, buffers) are the model's own to load.
        """
        for name, master in self.tensors.items():
            if name in tensors:
                master.copy_(tensors[name])
        self.push_weights()

    def release(self) -> None:
        """Undo it all: the model in fp32 with the masters as its weights, the optimizer on the model's parameters."""
        _replace(self._optimizer, self._masters, self._weights)
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.data = master
            weight.grad = None
        self._model.float()


def cast(model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> Masters | None:
    """Turn a model's weights to the dtype that a precision says; the masters, where it has some."""
    if precision.master:
        return Masters(model, optimizer)
    if precision.weights is torch.float16:
        to_half(model)
    elif precision.weights is torch.float64:
        model.double()
    return None


def to_half(model: nn.Module) -> None:
    """Turn everything that floats to fp16, batch norm too."""
    model.half()


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    """Let the model take its floating inputs in any dtype: they are cast to `dtype`, wherever nested."""

    def cast_them(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return model.register_forward_pre_hook(cast_them, with_kwargs=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _batch_norm_parameters(model: nn.Module) -> set[int]:
    layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
    return {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}


def _is_half_to_be(weight: Tensor, batch_norm_ids: set[int]) -> bool:
    return weight.is_floating_point() and id(weight) not in batch_norm_ids


def halve(model: nn.Module, *, weights: bool = True) -> None:
    """Turn a model to fp16, except batch norm; with `weights=False` only its buffers."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            continue
        for weight in module.parameters(recurse=False) if weights else ():
            if weight.is_floating_point():
                weight.data = weight.data.half()  # the same Parameter, so that ties and optimizer entries hold
                weight.grad = None
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.half())


def _replace(optimizer: torch.optim.Optimizer, old: list[Tensor], new: list[Tensor]) -> None:
    exchange = dict(zip(old, new, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [exchange.get(weight, weight) for weight in group["params"]]
    for weight, replacement in exchange.items():
        if weight in optimizer.state:
            optimizer.state[replacement] = optimizer.state.pop(weight)
