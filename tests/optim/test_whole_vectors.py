"""Updates of pieces of tensors against those of the whole: the same bits, wherever a tensor is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.optim.lamb import Lamb
from paceline.optim.novograd import NovoGrad
from paceline.optim.whole_vectors import update_by_vectors


def one_norm(tensors: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return the same norms for every piece, as several ranks that join their norms do."""
    return torch.ones(len(tensors), dtype=dtype or tensors[0].dtype, device="cpu")


def trained(kind: Any, weight: Tensor, gradients: list[Tensor], **options: Any) -> Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = kind([parameter], lr=0.1, weight_decay=0.01, **options)
    optimizer.use_shards(one_norm, None)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(("kind", "options"), [(Lamb, {}), (NovoGrad, {}), (NovoGrad, {"luc": True})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_piece_has_the_bits_of_the_whole(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Fails for both with `use_whole_vectors(False)`: torch's fused kernels round the end of a tensor otherwise."""
    numbers = torch.Generator().manual_seed(1)
    for size in (7, 16, 19, 100, 1000):
        weight, *gradients = torch.randn(4, size, generator=numbers, dtype=dtype, device="cpu").unbind()
        whole = trained(kind, weight, gradients, **options)
        for pieces in (2, 3, 4):
            parts = [
                trained(kind, part, [gradient.tensor_split(pieces)[index] for gradient in gradients], **options)
                for index, part in enumerate(weight.tensor_split(pieces))
            ]
            assert torch.equal(torch.cat(parts), whole), (size, pieces)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=5))
@settings(max_examples=50)
def test_every_number_is_updated_once(sizes: list[int]) -> None:
    columns = [
        [torch.full((size,), float(size), device="cpu", dtype=torch.float32) for size in sizes] for _ in range(2)
    ]

    def update(parts: list[list[Tensor]], positions: list[int]) -> None:
        for weight, other, position in zip(*parts, positions, strict=True):
            assert weight.numel() % 16 == 0
            weight.add_(other * 0 + 100.0 * (position + 1))

    update_by_vectors(update, columns)
    for position, (size, weight, other) in enumerate(zip(sizes, *columns, strict=True)):
        assert torch.equal(weight, torch.full_like(weight, size + 100.0 * (position + 1)))
        assert torch.equal(other, torch.full_like(other, float(size)))
