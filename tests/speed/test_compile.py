"""`compile_mode` reaches the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.speed.compile import MODES, compile_in_place


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_is_one_of_torchs_own_and_is_passed_on(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: asked.append(options) or call)
    model = torch.nn.Linear(2, 2)
    compile_in_place(model, mode)
    (options,) = asked
    assert options["mode"] == MODES[mode]
    assert options["mode"] == "default" or options["mode"] in torch._inductor.list_mode_options()
    # Graphs would overwrite outputs that a step still needs.
    assert not torch._inductor.list_mode_options().get(options["mode"], {}).get("triton.cudagraphs", False)
    assert torch.equal(model(torch.ones(1, 2)), torch.nn.functional.linear(torch.ones(1, 2), model.weight, model.bias))
