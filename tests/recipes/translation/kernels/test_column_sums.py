"""Sums over rows and the gradient of ReLU: kernels against PyTorch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


def test_column_sums(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.recipes.translation.kernels import column_sums

    monkeypatch.setattr(column_sums, "MOST_PROGRAMS", 4)  # several tiles for each
    dice = torch.Generator().manual_seed(0)
    wide, g, out = (torch.randn(70, width, generator=dice) for width in (300, 200, 200))
    torch.testing.assert_close(column_sums.column_sums(wide[:, 50:250]), wide[:, 50:250].sum(0), rtol=1e-4, atol=1e-4)
    expected = torch.where(out > 0, g, 0.0)
    sums = column_sums.relu_backward(g, out.relu())
    assert torch.equal(g, expected)
    torch.testing.assert_close(sums, expected.sum(0), rtol=1e-4, atol=1e-4)
