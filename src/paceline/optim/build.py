"""From settings to an optimizer: which parameters are trained, in which groups, by which rule.

Parameters keep the order of `model.named_parameters()`, so the optimizer's state has the same order on every rank.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import nn

from paceline.config.settings import BuiltInOptimizer, GroupSettings, OptimSettings
from paceline.core import plugins
from paceline.core.errors import InvalidSetting, NotFound
from paceline.core.torch_private import defer_compiler
from paceline.optim.adamw import AdamW
from paceline.optim.lamb import Lamb
from paceline.optim.muon import Muon, NothingForMuon, Rule, hidden_matrices, is_matrix
from paceline.optim.novograd import NovoGrad

ADAM_BETAS = (0.9, 0.999)
NOVOGRAD_BETAS = (0.95, 0.25)
"""Of NeMo's factory (its class has 0.98 as the second)."""


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Take the parameters whose names match out of training; returns their names."""
    parameters = dict(model.named_parameters())
    patterns = tuple(patterns)
    for pattern in patterns:
        _require_match("freeze", pattern, list(parameters))
    frozen = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


def groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: those of the settings in their order, then all the rest.

    Each carries its `lr_scale`, by which the schedule's learning rate is multiplied. Frozen parameters are left out,
    and so is a group whose parameters were all taken by a group before it.
    """
    names = [name for name, _ in model.named_parameters()]
    for group in settings.groups:
        _require_match("groups", group.match, names)
    rules = [*settings.groups, GroupSettings(match="*")]
    members: list[list[nn.Parameter]] = [[] for _ in rules]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        first = next(index for index, rule in enumerate(rules) if fnmatchcase(name, rule.match))
        members[first].append(parameter)
    if not trained:
        raise InvalidSetting("the model has no parameter left to train", hint="take a pattern out of `freeze`")
    made = [
        {
            "params": parameters,
            "lr": settings.lr * rule.lr_scale,
            "lr_scale": rule.lr_scale,
            "weight_decay": settings.weight_decay if rule.weight_decay is None else rule.weight_decay,
        }
        for rule, parameters in zip(rules, members, strict=True)
        if parameters
    ]
    return _routed(made, model, settings) if settings.optimizer == "muon" else made


def _routed(groups: list[dict[str, Any]], model: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """Cut each group into what Muon updates and what AdamW does."""
    matrices = {id(model.get_parameter(name)) for name in _muon_names(model, settings)}
    scales: dict[Rule, float] = {"muon": 1.0, "adamw": (settings.adamw_lr or settings.lr) / settings.lr}
    parts = []
    for group in groups:
        for rule, factor in scales.items():
            parameters = [each for each in group["params"] if (id(each) in matrices) == (rule == "muon")]
            rates = {"lr": group["lr"] * factor, "lr_scale": group["lr_scale"] * factor}
            parts += [{**group, "params": parameters, "rule": rule, **rates}] if parameters else []
    return parts


def _muon_names(model: nn.Module, settings: OptimSettings) -> list[str]:
    """Return the names of what Muon updates: the trained matrices that the settings name, or all hidden ones."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in settings.muon_match:
        _require_match("muon_match", pattern, names)
    if settings.muon_match:
        named = [name for name in names if any(fnmatchcase(name, pattern) for pattern in settings.muon_match)]
        chosen = [name for name in named if is_matrix(model.get_parameter(name), settings.muon_convolutions)]
    else:
        chosen = hidden_matrices(model, convolutions=settings.muon_convolutions)
    chosen = [name for name in chosen if model.get_parameter(name).requires_grad]
    if not chosen:
        convolutions = [each for each in model.parameters() if each.requires_grad and each.ndim > 2]
        raise NothingForMuon(0 if settings.muon_convolutions else len(convolutions))
    return chosen


def optimizer(settings: OptimSettings, groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
    """torch's own optimizer, or ours where torch has none.

    torch's is fused on CUDA, where it leaves the weights alone if its `found_inf` says so, without asking the host; as
    torch chooses on CPU, bitwise what a hand-written loop gets. AdamW is torch's, too, but for its kernel on CUDA. Ours
    are the same everywhere.
    """
    defer_compiler()
    fused = True if device.type == "cuda" else None
    betas = settings.betas or (NOVOGRAD_BETAS if settings.optimizer == "novograd" else ADAM_BETAS)
    match settings.optimizer:
        case "sgd" | "lars":
            # LARS is SGD whose gradients are scaled tensor by tensor: see `larc.py`.
            return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused)
        case "adam":
            return torch.optim.Adam(groups, lr=settings.lr, betas=betas, fused=fused)
        case "adamw":
            return AdamW(groups, lr=settings.lr, betas=betas, fused=fused)
        case "novograd":
            return NovoGrad(groups, lr=settings.lr, betas=betas)
        case "lamb":
            return Lamb(groups, lr=settings.lr, betas=betas)
        case "muon":
            return Muon(
                groups,
                lr=settings.lr,
                momentum=settings.muon_momentum,
                scale=settings.muon_scale,
                ns_steps=settings.muon_steps,
                ns_dtype=settings.muon_dtype,
                betas=betas,
            )
        case _:
            return _of_plugin(settings, groups, device)


def _of_plugin(settings: OptimSettings, groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
    """An optimizer that a plugin brings: a class, which gets what it takes and was set, or a function of everything."""
    plugin = plugins.find("optimizers", settings.optimizer)
    assert plugin is not None, "the settings were checked"
    make = plugins.load(plugin)
    if isinstance(make, type):
        options = {name: getattr(settings, name) for name in _taken(make) if _is_set(settings, name)}
        made = plugins.guarded(plugin, "cannot be made", lambda: make(groups, lr=settings.lr, **options))
    elif callable(make):
        made = plugins.guarded(plugin, "cannot be made", lambda: make(groups, settings, device))
    else:
        raise plugins.unfit(plugin, make, "a torch.optim.Optimizer class, or a function that returns one")
    if not isinstance(made, torch.optim.Optimizer):
        raise plugins.unfit(plugin, made, "a torch.optim.Optimizer")
    return made


def _taken(kind: type) -> list[str]:
    """Return the options of ours that an optimizer's class takes by name."""
    return [name for name in ("betas", "momentum") if name in inspect.signature(kind).parameters]


def _is_set(settings: OptimSettings, name: str) -> bool:
    return bool(getattr(settings, name) != type(settings).model_fields[name].default)


def unused(settings: OptimSettings) -> list[str]:
    """Options that were set but have no effect on the chosen optimizer."""
    if settings.optimizer in get_args(BuiltInOptimizer):
        idle = ["betas" if settings.optimizer in ("sgd", "lars") else "momentum"]
    else:
        plugin = plugins.find("optimizers", settings.optimizer)
        kind = None if plugin is None else plugins.load(plugin)
        # What a function heeds is not known.
        idle = [name for name in ("betas", "momentum") if name not in _taken(kind)] if isinstance(kind, type) else []
    return [name for name in idle if _is_set(settings, name)]


def zero_first_momentum(sgd: torch.optim.SGD) -> None:
    """Let the momentum of a fused SGD start at zero.

    torch leaves it uninitialised in the first step and lets the kernel fill it; where that step is skipped for an
    overflow (usual for fp16) it would never be filled. Done at the first step, when the dtypes are settled.
    """
    is_started = False

    def fill(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_started
        if is_started:
            return
        is_started = True
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else []:
                if optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    sgd.register_step_pre_hook(fill)


def _require_match(setting: str, pattern: str, names: list[str]) -> None:
    if not any(fnmatchcase(name, pattern) for name in names):
        nearest = difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.0)
        raise NotFound(
            f"{setting}: {pattern!r} matches no parameter of the model",
            hint=f"nearest parameter names: {', '.join(nearest)}" if nearest else "the model has no parameters",
        )


def signature(model: torch.nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    """Return the shapes of all parameters, and which are trained: optimizer and reduction are made for these."""
    return {name: (parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters()}
