"""Rows of an embedding: the kernel against PyTorch, in Triton's interpreter."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.speed.layers.kernels.row_norm import factor, kept, threshold


def test_embedded_rows(interpreted: None) -> None:
    from paceline.speed.layers.kernels import embedded_rows

    dice = torch.Generator().manual_seed(1)
    table, positions = torch.randn(50, 48, generator=dice), torch.randn(16, 48, generator=dice)
    weight, bias = torch.randn(48, generator=dice), torch.randn(48, generator=dice)
    tokens, places = torch.randint(0, 50, (9,), generator=dice), torch.arange(9) + 20
    seed = torch.tensor([5, -9], dtype=torch.int32)
    given = tokens, places, positions, weight, bias, seed, 16, 3.0, threshold(0.3), factor(0.3), 1e-5, torch.float32
    normed, total, _ = embedded_rows.forward(table, *given)
    expected = (table[tokens] * 3 + positions[places % 16]) * kept(seed, total.shape, 0.3) * factor(0.3)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, F.layer_norm(expected, (48,), weight, bias), rtol=1e-4, atol=1e-5)
