"""Weights turned and cast, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs Triton")

SHAPES = [(3, 40, 11), (2, 130, 29), (2, 7, 200), (1, 1, 1), (2, 256, 1)]


@pytest.fixture
def device() -> Iterator[str]:
    """What the kernel does not write is nan."""
    torch.use_deterministic_algorithms(True)
    yield "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_turn(device: str, shape: tuple[int, int, int]) -> None:
    from paceline.recipes.speech.kernels.turn import can_turn, turn

    values = torch.randint(-128, 129, shape).float().to(device)  # whole numbers that bfloat16 has
    assert can_turn(values)
    for source, dtype in ((values, torch.bfloat16), (values.bfloat16(), torch.float32)):
        turned = turn(source, dtype)
        assert turned.dtype is dtype
        assert turned.is_contiguous()
        assert torch.equal(turned.float(), values.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [*SHAPES, (768, 768, 25)], ids=str)
def test_turn_on_a_gpu(device: str, shape: tuple[int, int, int]) -> None:
    test_turn(device, shape)


def test_what_cannot_be_turned() -> None:
    from paceline.recipes.speech.kernels.turn import can_turn

    assert not can_turn(torch.empty(2, 200, 200))
    assert not can_turn(torch.empty(2, 30, 200).transpose(1, 2))
