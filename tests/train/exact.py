"""Small models of several kinds, trained by the engine on any number of ranks, and by a plain loop that adds the tree.

What they come to is returned as digests of bytes: weights, buffers, optimizer state, moving average, losses, norms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import EngineConfig, OptimSettings
from paceline.core.keys import key
from paceline.data.collate import stack_collate
from paceline.data.grain import Grain
from paceline.data.plan import BatchRule, Plan
from paceline.optim import larc
from paceline.optim.build import groups as build_groups
from paceline.optim.build import optimizer as build_optimizer
from paceline.optim.state import pack
from paceline.train.engine import Engine
from paceline.world.link import Link

STATISTICS = ("running_mean", "running_var")
SEED, BATCH, SAMPLES, CLASSES = 5, 32, 90, 64  # a last batch of 26 samples


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8, momentum=None),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x.unsqueeze(1)))
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x)[0][:, -1])
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(8, 16))
        self.enter = nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(self.enter(x) + self.place).mean(1))
        return result


@dataclass(frozen=True)
class Case:
    """A training: model, settings of the engine and of the optimizer."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    grains: int = 8
    bf16: bool = False
    """Forward in bfloat16 (by the loss itself: not every CPU has instructions for it, which `-O2` asks for)."""


MODELS: dict[str, Callable[[], nn.Module]] = {"conv": ConvNet, "lstm": Recurrent, "transformer": Transformer}


class Points(torch.utils.data.Dataset[Any]):
    """Random images of 8 x 8, or rows of 8 vectors."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.x = torch.from_numpy(random.normal(size=(SAMPLES, 8, 8)).astype(np.float32))
        self.y = torch.from_numpy(random.integers(0, CLASSES, SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def _made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = MODELS[case.model]()
    settings = OptimSettings(**{"lr": 0.01, **case.optim})
    optimizer = build_optimizer(settings, build_groups(model, settings), torch.device("cpu"))
    larc.attach(optimizer, settings)
    return model, optimizer


def _loss(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    x = x.double() if case.settings.get("precision") == "fp64" else x
    with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def train(link: Link, case: Case) -> dict[str, str]:
    """Train by the engine; return digests by name."""
    model, optimizer = _made(case)
    engine = Engine(EngineConfig(seed=SEED, device="cpu", threads=1, **case.settings), link=link)
    engine.prepare(model, optimizer)
    numbers: dict[str, Any] = {}

    def loss(grain: Grain) -> tuple[Tensor, int]:
        return _loss(case, model, grain.x, grain.y)

    for batch in engine.batches(Points(), global_batch=BATCH, grains=case.grains, workers=0, epochs=1000):
        step = engine.step(loss, batch)
        numbers[f"loss {step.number}"] = np.float64(step.loss)
        if step.gradient_norm is not None:
            numbers[f"norm {step.number}"] = step.gradient_norm
        if engine.num_steps == case.steps:
            break
    prepared = engine.prepared
    with engine.whole_statistics():
        state: dict[str, Tensor] = dict(model.named_buffers())
        state |= {f"optimizer {k}": v for k, v in pack(optimizer, prepared.optimizer_names())[0].items()}
        weights = prepared.named_weights()
        average = {} if prepared.average is None else prepared.average.state_dict()
        if prepared.shards is not None:
            of = _parameter_of(weights)
            weights = prepared.shards.whole(weights)
            average = prepared.shards.whole(average)
            state = prepared.shards.whole(state, of)
        everything = {**numbers, **state, **weights, **{f"average {name}": v for name, v in average.items()}}
        result = {name: digest(value) for name, value in everything.items()}
    engine.release()
    return result


def _parameter_of(weights: dict[str, Tensor]) -> Callable[[str], str]:
    def of(name: str) -> str:
        return next((weight for weight in weights if name.startswith(f"optimizer {weight}")), "")

    return of


def digest(value: Any) -> str:
    array = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if isinstance(value, Tensor) else value
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


# -- the same by hand --------------------------------------------------------------------------------------------------


def add_up(values: list[Any]) -> Any:
    """The sum of a list: of its first 2^k, the largest power of two below its length, and of the rest."""
    if len(values) == 1:
        return values[0]
    first = 1
    while 2 * first < len(values):
        first *= 2
    return add_up(values[:first]) + add_up(values[first:])


def by_hand(case: Case) -> dict[str, str]:
    """Plain PyTorch: gradients of each grain apart, added as `add_up` does it; clipping and moving average by torch."""
    model, optimizer = _made(case)
    dtype = torch.float64 if case.settings.get("precision") == "fp64" else torch.float32
    model.to(dtype)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    data, numbers, epoch, done = Points(), {}, 0, 0
    while done < case.steps:
        plan = Plan(SAMPLES, rule=BatchRule(BATCH), grains=case.grains, seed=SEED, epoch=epoch)
        epoch += 1
        for step in range(plan.num_steps):
            grains, count = plan.grains(step), len(plan.batch(step))
            before = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]  # type: ignore[union-attr]
            calls = [int(norm.num_batches_tracked) for norm in norms]  # type: ignore[arg-type]
            gradients, losses, statistics = [], [], []
            for number, samples in enumerate(grains):
                torch.manual_seed(key(SEED, done, number))
                for norm, values, n in zip(norms, before, calls, strict=True):
                    for name, value in zip(STATISTICS, values, strict=True):
                        norm.get_buffer(name).copy_(value)
                    norm.get_buffer("num_batches_tracked").fill_(n)
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                x, y = stack_collate([data[int(sample)] for sample in samples])
                loss, _ = _loss(case, model, x, y)
                loss.backward(_seed(loss, count))
                gradients.append([parameter.grad for parameter in parameters])
                losses.append(loss.detach())
                later = len(grains) - 1 - number
                each_norm = zip(norms, before, calls, strict=True)
                statistics.append([_added(norm, values, n, later) for norm, values, n in each_norm])
            for parameter, each in zip(parameters, zip(*gradients, strict=True), strict=True):
                parameter.grad = add_up(list(each))
            for place, norm in enumerate(norms):
                for part, name in enumerate(STATISTICS):
                    total = add_up([each[place][part] for each in statistics])
                    old, n, now = before[place][part], calls[place], len(grains)
                    if norm.momentum is None:
                        keep = torch.tensor(n / (n + now), dtype=torch.float64).to(dtype)
                        total = total * torch.tensor(1.0 / (n + now), dtype=torch.float64).to(dtype)
                    else:
                        keep = torch.tensor(1.0 - norm.momentum, dtype=torch.float64).pow(now).to(dtype)
                    norm.get_buffer(name).copy_(old * keep + total)
                norm.get_buffer("num_batches_tracked").fill_(calls[place] + len(grains))
            numbers[f"loss {done}"] = np.float64(float(add_up(losses)) / count)
            if clip := case.settings.get("clip_norm"):
                numbers[f"norm {done}"] = nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            for name, weight in model.named_parameters():
                average[name].lerp_(weight.detach(), 1.0 - case.settings.get("ema", 0.0))
            done += 1
            if done == case.steps:
                break
    names = {weight: name for name, weight in model.named_parameters()}
    state = {f"optimizer {name}": value for name, value in pack(optimizer, names)[0].items()}
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    averages = {f"average {name}": value for name, value in average.items()} if case.settings.get("ema") else {}
    everything = {**numbers, **dict(model.named_buffers()), **state, **weights, **averages}
    return {name: digest(value) for name, value in everything.items()}


def _seed(loss: Tensor, count: int) -> Tensor:
    return torch.full_like(loss, 1.0 / count)


def _added(norm: Any, before: Sequence[Tensor], calls: int, later: int) -> list[Tensor]:
    """What a grain has added to a layer's statistics, decayed for the grains after it."""

    def factor(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64).to(norm.running_mean.dtype)

    pairs = [(norm.get_buffer(name), value) for name, value in zip(STATISTICS, before, strict=True)]
    if norm.momentum is None:
        return [now * factor(calls + 1.0) - old * factor(float(calls)) for now, old in pairs]
    keep = 1.0 - norm.momentum
    return [(now - old * factor(keep)) * factor(keep**later) for now, old in pairs]
