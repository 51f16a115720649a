"""`prepare`: what it refuses, what it hooks, and that a model can be given back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.config.settings import OptimSettings
from paceline.core.errors import TaskContract
from paceline.core.torch_private import step_pre_hooks
from paceline.optim import build
from paceline.train.engine import Engine
from paceline.train.prepare import DividesByZero
from paceline.train.stepper import NotPrepared
from tests.train.small import alone


def test_the_momentum_of_a_fused_optimizer_is_filled_by_one_hook() -> None:
    model = nn.Linear(3, 2)
    groups = [{"params": list(model.parameters())}]
    sgd = build.optimizer(OptimSettings(optimizer="sgd", momentum=0.9), groups, torch.device("cuda"))
    assert sgd.defaults["fused"]
    Engine(link=alone(), level=0).prepare(model, sgd)
    assert len(list(step_pre_hooks(sgd))) == 1


def test_parameters_of_another_model_are_refused() -> None:
    foreign = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    with pytest.raises(TaskContract, match="updates 2 parameters that the model does not have"):
        Engine(link=alone(), level=0).prepare(nn.Linear(3, 2), foreign)


def test_fp16_state_that_would_be_divided_by_is_refused() -> None:
    """Seen without it: all weights are inf or nan after the first step."""
    model = nn.Linear(3, 2)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        with pytest.raises(DividesByZero, match=f"{kind.__name__} divides by 0: .* its eps, 1e-08, vanish") as caught:
            Engine(link=alone(), precision="fp16-pure").prepare(model, kind(model.parameters()))
        assert caught.value.excludes
    groups = [{"params": list(model.parameters())}]
    for name in ("sgd", "novograd", "lamb", "lars"):
        made = build.optimizer(OptimSettings(optimizer=name), groups, torch.device("cpu"))
        Engine(link=alone(), precision="fp16-pure").prepare(model, made)
    Engine(link=alone(), precision="fp16-pure").prepare(model, torch.optim.AdamW(model.parameters(), eps=1e-3))
    Engine(link=alone(), precision="fp16-master").prepare(model.float(), torch.optim.AdamW(model.parameters()))


def test_a_released_engine_has_no_model_until_it_is_prepared_again() -> None:
    engine, model = Engine(link=alone(), level=0), nn.Linear(3, 2)
    with pytest.raises(NotPrepared, match="the engine has no model"):
        engine.sync()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=lambda step: 0.5)
    engine.release()
    with pytest.raises(NotPrepared):
        _ = engine.model
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert engine.model is model
    engine.close()
