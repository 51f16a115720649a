"""LARC against its formulas in float64, around several optimizers; LARS against timm's arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.settings import TrainConfig
from paceline.core.errors import InvalidData
from paceline.observe.callback import Watcher
from paceline.optim.larc import LARS, Larc, Rule, rule_of
from paceline.optim.layerwise import OutOfRange
from paceline.optim.novograd import NovoGrad
from paceline.train.loop import train
from paceline.train.run import open_run
from tests.train.small import SmallTask, alone

SHAPES = [(4, 3), (6,), (2, 2, 3), (6,), (4, 3), (5, 1)]
STEPS, LR, DECAY = 4, 0.3, 0.05


def weights(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    """The fourth is all 0; the third is tiny, so that the clip is not always 1."""
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    made[2] *= 1e-3
    made[3].zero_()
    return [torch.nn.Parameter(each.to(dtype)) for each in made]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """That of the fifth is all 0 in the first step."""
    random = torch.Generator().manual_seed(step + 10)
    made = [
        torch.randn(shape, generator=random, dtype=torch.float64) * 10.0 ** (index - 3)
        for index, shape in enumerate(SHAPES)
    ]
    if step == 0:
        made[4].zero_()
    return [each.to(dtype) for each in made]


def by_formula(rule: Rule, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> Tensor:
    """One tensor, plain numbers."""
    if rule.exclude_vectors and weight.dim() == 1:
        return gradient + decay * weight if rule.decay_inside else gradient
    size, steep = math.sqrt(float((weight**2).sum())), math.sqrt(float((gradient**2).sum()))
    if rule.zero == "skip" and (size == 0 or steep == 0):
        return gradient
    if rule.decay_inside:
        local = rule.eta * size / (steep + decay * size + rule.epsilon)
        gradient = gradient + decay * weight
    else:
        local = rule.eta * size / (steep + rule.epsilon)
    ratio = max(local / lr, rule.min_update) if rule.mode == "clip" else max(local, rule.min_update)
    return gradient * (min(ratio, 1.0) if rule.mode == "clip" else ratio)


RULES = [
    Rule(mode, eta, epsilon, min_update, decay_inside=inside, zero=zero, exclude_vectors=excludes)  # type: ignore[arg-type]
    for mode in ("clip", "scale")
    for eta, epsilon, min_update in ((0.02, 1e-7, 1e-7), (0.5, 1e-3, 0.01), (0.02, 1e-8, 0.0))
    for inside in (False, True)
    for zero in ("freeze", "skip")
    for excludes in (False, True)
]
AROUND: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=LR),
    "novograd": lambda groups: NovoGrad(groups, lr=LR),
}


def groups_of(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """The last two with another rate and no decay."""
    return [
        {"params": parameters[:4], "weight_decay": DECAY},
        {"params": parameters[4:], "weight_decay": 0.0, "lr": LR / 7},
    ]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_formula(rule: Rule, around: str) -> None:
    ours, theirs = weights(), weights()
    optimizer, plain = AROUND[around](groups_of(ours)), AROUND[around](groups_of(theirs))
    larc = Larc(optimizer, rule)
    if rule.decay_inside:
        for group in plain.param_groups:
            group["weight_decay"] = 0.0
    for step in range(STEPS):
        for index, (mine, other, gradient) in enumerate(zip(ours, theirs, gradients(step), strict=True)):
            mine.grad = gradient.clone()
            decay, lr = (DECAY, LR) if index < 4 else (0.0, LR / 7)
            other.grad = by_formula(rule, other.detach(), gradient, lr, decay)
        optimizer.step()
        plain.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]
    larc.remove()
    ours[0].grad = gradients(0)[0]
    before = ours[0].grad.clone()
    optimizer.step()
    assert torch.equal(ours[0].grad, before)


@pytest.mark.parametrize("clips", [False, True])
def test_lars_is_timms(clips: bool) -> None:
    """Its update, written down from timm 1.0's Lars: trust ratio, decay, momentum; `trust_clip` is our clip mode.

    (Where a gradient is all 0, timm decays and Apex, as we, does not.)
    """
    rule = Rule("clip", 0.001, 1e-8, 0.0, decay_inside=True, zero="skip") if clips else LARS
    ours, theirs = weights(), [weight.detach().clone() for weight in weights()]
    optimizer = torch.optim.SGD(ours, lr=LR, momentum=0.9, weight_decay=DECAY)
    Larc(optimizer, rule)
    momenta: list[Tensor | None] = [None] * len(theirs)
    for step in range(STEPS):
        for index, (weight, gradient) in enumerate(zip(theirs, gradients(step + 1), strict=True)):
            ours[index].grad = gradient.clone()
            size, steep = weight.norm(), gradient.norm()
            trust = 0.001 * size / (steep + size * DECAY + 1e-8)
            trust = torch.where(size > 0, torch.where(steep > 0, trust, 1.0), 1.0)
            if clips:
                trust = torch.minimum(trust / LR, torch.ones_like(trust))
            update = (gradient + DECAY * weight) * trust
            before = momenta[index]
            momenta[index] = update if before is None else 0.9 * before + update
            theirs[index] = weight - LR * momenta[index]
        optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.detach(), other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_of_short_dtypes_are_taken_in_fp32(dtype: torch.dtype) -> None:
    """fp16 squares of 1e4 and 1e-5 would overflow and vanish."""
    rule = Rule("scale", 0.01)
    for size in (1e4, 1e-4):
        weight = torch.nn.Parameter(torch.full((3, 5), size, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        Larc(optimizer, rule)
        weight.grad = torch.full((3, 5), 2 * size, dtype=dtype)
        before = weight.detach().double()
        given = weight.grad.double()
        optimizer.step()
        expected = before - by_formula(rule, before, given, 1.0, 0.0)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_weights_that_are_not_contiguous() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    same = torch.nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    for parameter in (weight, same):
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        Larc(optimizer)
        parameter.grad = torch.ones_like(parameter).cumsum(1)
        optimizer.step()
    torch.testing.assert_close(weight, same)


class NoReads(TorchDispatchMode):
    """Fails when the host asks for a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read by the host"
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing() -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=DECAY, foreach=True)
    larc = Larc(optimizer, Rule(decay_inside=True, zero="skip"))
    for step in range(2):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        with NoReads():
            larc._before(optimizer, (), {})
            larc._after(optimizer, (), {})


def test_mistakes() -> None:
    with pytest.raises(OutOfRange, match="eta"):
        Rule(eta=0.0)
    with pytest.raises(OutOfRange, match="epsilon"):
        Rule(epsilon=-1.0)
    with pytest.raises(ValueError, match="LARS has layer-wise rates already"):
        TrainConfig(epochs=1, optimizer="lars", larc="clip")
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    Larc(optimizer)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidData, match="LARC"):
        optimizer.step()


def test_settings_become_rules() -> None:
    def rule(**settings: Any) -> Rule | None:
        return rule_of(TrainConfig(epochs=1, **settings))

    assert rule() is None
    assert rule(larc="clip") == Rule()
    assert rule(optimizer="lars", larc_exclude="vectors") == Rule("scale", 0.001, 1e-8, 0.0, True, "skip", True)
    assert rule(optimizer="lars", larc_eta=0.01).eta == 0.01  # type: ignore[union-attr]
    assert rule(
        larc="scale", larc_eta=0.02, larc_epsilon=1e-8, larc_min_update=0.0, larc_decay="inside", larc_zero="skip"
    ) == Rule("scale", 0.02, 1e-8, 0.0, decay_inside=True, zero="skip")


class Rates(Watcher):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def step(self, records: list[dict[str, Any]]) -> None:
        self.records += records


def test_a_run_with_larc_shows_its_rates(tmp_path: Path) -> None:
    """In the trainer: the last step of every log line has the rate of each layer; the journal stays short."""
    watcher = Rates()
    settings = {"steps": 6, "log_every": 3, "optimizer": "sgd", "lr": 0.5, "momentum": 0.0, "level": 0, "order": "none"}
    settings |= {"global_batch": 8, "workers": 0, "out": tmp_path / "run"}
    trainer = open_run(SmallTask(), TrainConfig(**settings, larc="clip", larc_eta=0.01), alone(), [watcher])
    names = [name for name, _ in trainer.stepper.model.named_parameters()]
    train(trainer)
    shown = [record for record in watcher.records if len(record) > 5]
    assert [record["step"] for record in shown] == [2, 5]
    for record in shown:
        rates = [record[f"larc/{name}"] for name in names]
        assert all(0 < rate <= 0.5 for rate in rates)
        assert len(set(rates)) > 1
    assert "larc" not in (tmp_path / "run" / "metrics.jsonl").read_text()
