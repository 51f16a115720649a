"""`compile_mode` reaches the compiler, and its recompiles are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.speed.compile import MODES, compile_in_place, compiled_so_far


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


def test_recompiles_are_torchs_own_count() -> None:
    before = compiled_so_far()

    @torch.compile(backend="eager", dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    for length in (3, 4, 4, 5):
        double(torch.ones(length))
    assert compiled_so_far().since(before).recompiles == 2
    assert compiled_so_far().since(before).seconds > 0
