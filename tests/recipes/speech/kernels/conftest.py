"""Fixtures of tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton's interpreter run kernels on the CPU; what they do not write is nan."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernels run there")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_whole_numbers(tensor: Any, scope: Any) -> None:
        """Triton 3.6 cannot count to a number it was given, with numpy from 2.4 on."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_whole_numbers)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
