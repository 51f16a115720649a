"""Parameter groups by pattern; optimizers bitwise as torch's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.settings import OptimSettings
from paceline.core.errors import InvalidSetting, NotFound
from paceline.optim.build import (
    freeze,
    groups,
    optimizer,
    unused,
    zero_first_momentum,
)
from paceline.optim.lamb import Lamb
from paceline.optim.novograd import NovoGrad

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nn.ModuleDict({"encoder": body, "decoder": nn.Linear(4, 2)})


def settings(**values: object) -> OptimSettings:
    return OptimSettings.model_validate({"lr": 0.1, "weight_decay": 0.01, **values})


def names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for parameter in group["params"]]


def test_first_match_wins_and_the_rest_comes_last() -> None:
    model = network()
    rules = [
        {"match": "*.bias", "weight_decay": 0.0},
        {"match": "encoder.*", "lr_scale": 0.5},
        {"match": "encoder.0.weight", "lr_scale": 9.0},
    ]
    found = groups(model, settings(groups=rules))
    assert [names(model, group) for group in found] == [
        ["encoder.0.bias", "encoder.1.bias", "decoder.bias"],
        ["encoder.0.weight", "encoder.1.weight"],
        ["decoder.weight"],
    ]
    assert [(group["lr"], group["lr_scale"], group["weight_decay"]) for group in found] == [
        (0.1, 1.0, 0.0),
        (0.05, 0.5, 0.01),
        (0.1, 1.0, 0.01),
    ]


def test_without_patterns_one_group_in_the_models_order() -> None:
    model = network()
    (group,) = groups(model, settings())
    assert names(model, group) == [name for name, _ in model.named_parameters()]


def test_frozen_parameters_are_left_out_and_do_not_move() -> None:
    model = network()
    assert freeze(model, ["encoder.*", "*.bias"]) == [
        "encoder.0.weight",
        "encoder.0.bias",
        "encoder.1.weight",
        "encoder.1.bias",
        "decoder.bias",
    ]
    (group,) = groups(model, settings())
    assert names(model, group) == ["decoder.weight"]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    update = optimizer(settings(optimizer="sgd"), [group], CPU)
    model["decoder"](model["encoder"](torch.randn(8, 4))).sum().backward()
    update.step()
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert moved == ["decoder.weight"]


def test_patterns_without_match_name_the_nearest() -> None:
    with pytest.raises(NotFound, match="matches no parameter") as caught:
        freeze(network(), ["encodr.0.weight"])
    assert str(caught.value) == "freeze: 'encodr.0.weight' matches no parameter of the model"
    assert caught.value.hint.startswith("nearest parameter names: encoder.0.weight")
    with pytest.raises(NotFound, match="groups: 'head"):
        groups(network(), settings(groups=[{"match": "head.*"}]))
    model = network()
    freeze(model, ["*"])
    with pytest.raises(InvalidSetting, match="no parameter left to train"):
        groups(model, settings())


RAW = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.95), weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.95), weight_decay=0.01),
}


@pytest.mark.parametrize("kind", RAW)
def test_bitwise_as_a_raw_loop_on_cpu(kind: str) -> None:
    ours, raw = network(), network()
    chosen = settings(optimizer=kind, betas=(0.8, 0.95))
    updates = [optimizer(chosen, groups(ours, chosen), CPU), RAW[kind](raw.parameters())]
    for step in range(5):
        for model, update in zip((ours, raw), updates, strict=True):
            torch.manual_seed(step)
            update.zero_grad()
            model["decoder"](model["encoder"](torch.randn(8, 4))).square().sum().backward()
            update.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), raw.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["novograd", "lamb"])
def test_our_own_get_every_setting(kind: str) -> None:
    """Groups with their decay and rate, betas where they are set, else each optimizer's own."""
    raw = {"novograd": NovoGrad, "lamb": Lamb}[kind]
    ours, theirs = network(), network()
    chosen = settings(optimizer=kind, groups=[{"match": "*.bias", "weight_decay": 0.0, "lr_scale": 0.5}])
    update = optimizer(chosen, groups(ours, chosen), CPU)
    assert update.defaults["betas"] == {"novograd": (0.95, 0.25), "lamb": (0.9, 0.999)}[kind]
    biases = [parameter for name, parameter in theirs.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in theirs.named_parameters() if not name.endswith("bias")]
    reference = raw(
        [{"params": biases, "lr": 0.05, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.01}], lr=0.1
    )
    for step in range(3):
        for model, each in ((ours, update), (theirs, reference)):
            torch.manual_seed(step)
            each.zero_grad()
            model["decoder"](model["encoder"](torch.randn(8, 4))).square().sum().backward()
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    with_betas = settings(optimizer=kind, betas=(0.7, 0.8))
    assert optimizer(with_betas, groups(ours, with_betas), CPU).defaults["betas"] == (0.7, 0.8)


def test_options_without_effect_are_listed() -> None:
    assert unused(settings(optimizer="novograd", momentum=0.5, betas=(0.9, 0.5))) == ["momentum"]
    assert unused(settings(optimizer="sgd", momentum=0.5, betas=(0.9, 0.5))) == ["betas"]
    assert unused(settings(optimizer="sgd", momentum=0.5)) == unused(settings()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", RAW)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_on_gpu_a_found_inf_skips_the_update_without_waiting(kind: str, dtype: torch.dtype) -> None:
    """Steps 0 and 3 overflow: the result is that of the clean steps alone, also though the very first was skipped."""
    device = torch.device("cuda")
    ours, raw = (nn.Linear(64, 64).to(device) for _ in range(2))
    ours.load_state_dict(raw.state_dict())
    chosen = settings(optimizer=kind, betas=(0.8, 0.95))
    update, reference = optimizer(chosen, groups(ours, chosen), device), RAW[kind](raw.parameters(), fused=True)
    if isinstance(update, torch.optim.SGD):
        zero_first_momentum(update)  # as `prepare` does
    ours.to(dtype)  # after the optimizer was built, as an engine does
    raw.to(dtype)
    draw = torch.Generator(device).manual_seed(0)
    gradients = [
        [torch.randn(p.shape, device=device, generator=draw, dtype=dtype) for p in raw.parameters()] for _ in range(6)
    ]
    flags = [torch.tensor(float(step in (0, 3)), device=device) for step in range(6)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6):
            for parameter, gradient in zip(ours.parameters(), gradients[step], strict=True):
                parameter.grad = gradient.clone()
            update.found_inf = flags[step]
            update.grad_scale = None
            update.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in (1, 2, 4, 5):
        for parameter, gradient in zip(raw.parameters(), gradients[step], strict=True):
            parameter.grad = gradient.clone()
        reference.step()
    for one, other in zip(ours.parameters(), raw.parameters(), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)
