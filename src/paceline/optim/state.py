"""An optimizer's state by parameter name: tensors apart from plain values, independent of ranks and of group order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import InvalidData, PacelineError

OWN_LR = "own_lr"
"""Entry of a group whose learning rate is the user's own, which a schedule scales instead of replacing it."""
_NUMBERS = (
    "lr",
    OWN_LR,
    "initial_lr",
    "lr_scale",
    "weight_decay",
    "betas",
    "momentum",
    "dampening",
    "eps",
    "alpha",
    "rho",
)
_CHOICES = (
    "nesterov",
    "centered",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
    "grad_averaging",
    "luc",
    "rule",
    "scale",
)
_WAYS = ("foreach", "capturable", "differentiable", "fused", "luc_trust", "luc_eps", "adapt_undecayed", "trust_range")
_MUON = ("ns_steps", "ns_coefficients", "ns_dtype")
SETTINGS = frozenset((*_NUMBERS, *_CHOICES, *_WAYS, *_MUON))
"""Entries of a parameter group that the user sets; everything else there is an optimizer's own state."""
SEPARATOR = "/"
"""Between a parameter's name and the name of a state tensor; parameter names never contain it."""


class StateMisfit(PacelineError):
    """The saved optimizer state is not for these parameters."""

    missing: list[str]
    unexpected: list[str]
    sentence = "the saved optimizer state does not fit: nothing for {lost}, not trained here {extra}"
    hint = "resume with the settings of the run, or start a new run with `init_from` to take the weights only"

    @property
    def lost(self) -> list[str]:
        return self.missing[:3]

    @property
    def extra(self) -> list[str]:
        return self.unexpected[:3]


def pack(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by `parameter/entry`, plain values) of an optimizer; `names` maps its tensors to parameter names."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        for entry, value in entries.items():
            name = names[parameter]
            if isinstance(value, Tensor):
                tensors[f"{name}{SEPARATOR}{entry}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                plain.setdefault(name, {})[entry] = value
            else:
                raise InvalidData(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {entry!r}, "
                    "which a checkpoint cannot hold",
                    hint="use another optimizer, or one whose state per parameter is tensors and numbers",
                )
    groups = [
        {
            "names": [names[parameter] for parameter in group["params"]],
            "values": {key: value for key, value in group.items() if key != "params" and _is_plain(value)},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"groups": groups, "values": plain}


def parameter_of(key: str) -> str:
    """The parameter that an entry of the tensors belongs to."""
    return key.rsplit(SEPARATOR, 1)[0]


def unpack(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor], plain: dict[str, Any]
) -> None:
    """The counterpart of `pack`. Group settings are the run's own (settings decide), the rest is as saved."""
    saved = {name for group in plain["groups"] for name in group["names"]}
    if saved != set(names.values()):
        raise StateMisfit(sorted(set(names.values()) - saved), sorted(saved - set(names.values())))
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in plain["values"].items()}
    for key, tensor in tensors.items():
        name, entry = key.rsplit(SEPARATOR, 1)
        state.setdefault(name, {})[entry] = tensor.clone()
    target = optimizer.state_dict()
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    target["state"] = {index: state[name] for index, name in enumerate(order) if name in state}
    values_of = {name: group["values"] for group in plain["groups"] for name in group["names"]}
    for group, live in zip(target["param_groups"], optimizer.param_groups, strict=True):
        before = values_of[names[live["params"][0]]]
        # What an optimizer counts in its groups is state; what the user set is the run's own.
        group.update({key: value for key, value in before.items() if key not in SETTINGS})
    optimizer.load_state_dict(target)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)
