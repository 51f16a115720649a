"""Attention with relative positions against the formula of its paper, pair by pair of frames, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.recipes.speech.network.conformer.attention import (
    attention,
    rel_attention,
    rel_local_attention,
    sinusoids,
    visible_frames,
)

BATCH, HEADS, SIZE = 3, 2, 4


def tensors(time: int, num_positions: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(time)
    q, k, v = torch.randn(3, BATCH, HEADS, time, SIZE, dtype=torch.float64).unbind()
    p = torch.randn(HEADS, num_positions, SIZE, dtype=torch.float64)
    u_bias, v_bias = torch.randn(2, HEADS, SIZE, dtype=torch.float64).unbind()
    return q, k, v, p, u_bias, v_bias


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    u_bias: Tensor,
    v_bias: Tensor,
    lengths: list[int],
    sees: Tensor,
) -> list[Tensor]:
    """The valid frames of each utterance; position r of `p` is the middle one less r."""
    middle = p.shape[1] // 2
    outputs = []
    for row, length in enumerate(lengths):
        out = torch.zeros(HEADS, length, SIZE, dtype=torch.float64)
        for head in range(HEADS):
            for i in range(length):
                keys = [j for j in range(length) if sees[i, j]]
                scores = [
                    (q[row, head, i] + u_bias[head]) @ k[row, head, j]
                    + (q[row, head, i] + v_bias[head]) @ p[head, middle - (i - j)]
                    for j in keys
                ]
                weights = torch.softmax(torch.stack(scores) / math.sqrt(SIZE), 0)
                out[head, i] = sum((w * v[row, head, j] for w, j in zip(weights, keys, strict=True)), torch.zeros(SIZE))
        outputs.append(out)
    return outputs


def check(found: Tensor, expected: list[Tensor]) -> None:
    assert found.isfinite().all()
    for row, out in enumerate(expected):
        torch.testing.assert_close(found[row, :, : out.shape[1]], out, rtol=0, atol=1e-12)


def test_relative_attention_is_the_formula() -> None:
    time, lengths = 9, [9, 5, 0]
    all_of_it = tensors(time, 2 * time - 1)
    everything = torch.ones(time, time, dtype=torch.bool)
    check(rel_attention(*all_of_it, torch.tensor(lengths)), naive(*all_of_it, lengths, everything))


@pytest.mark.parametrize(
    ("context", "style"),
    [
        ((2, 1), "regular"),
        ((-1, 1), "regular"),
        ((2, -1), "regular"),
        ((4, 1), "chunked_limited"),
        ((-1, 2), "chunked_limited"),
    ],
)
def test_contexts_are_windows_or_chunks(context: tuple[int, int], style: str) -> None:
    time, lengths = 11, [11, 6, 1]
    before, after = context
    sees = torch.zeros(time, time, dtype=torch.bool)
    for i in range(time):
        for j in range(time):
            if style == "regular":
                sees[i, j] = (before < 0 or i - j <= before) and (after < 0 or j - i <= after)
            else:
                first = (i // (after + 1)) * (after + 1)
                sees[i, j] = (before < 0 or j >= first - before) and j <= first + after
    visible = visible_frames(context, style, time, torch.device("cpu"))
    assert visible is not None
    assert visible.equal(sees)
    all_of_it = tensors(time, 2 * time - 1)
    check(rel_attention(*all_of_it, torch.tensor(lengths), visible=visible), naive(*all_of_it, lengths, sees))


@pytest.mark.parametrize("window", [1, 3, 7, 20])
def test_local_attention_is_the_same_within_its_window(window: int) -> None:
    time, lengths = 13, [13, 8, 2]
    all_of_it = tensors(time, 2 * window + 1)
    frame = torch.arange(time)
    sees = (frame - frame[:, None]).abs() <= window
    check(rel_local_attention(*all_of_it, torch.tensor(lengths)), naive(*all_of_it, lengths, sees))


def test_absolute_attention_is_that_without_positions() -> None:
    time, lengths = 6, [6, 4, 3]
    q, k, v, p, u_bias, _ = tensors(time, 2 * time - 1)
    nothing = torch.zeros_like(u_bias)
    everything = torch.ones(time, time, dtype=torch.bool)
    expected = naive(q, k, v, torch.zeros_like(p), nothing, nothing, lengths, everything)
    check(attention(q, k, v, torch.tensor(lengths)), expected)


def test_gradients_are_finite_where_a_frame_sees_nothing() -> None:
    time = 8
    q, k, v, p, u_bias, v_bias = (each.requires_grad_() for each in tensors(time, 2 * time - 1))
    visible = visible_frames((2, 1), "chunked_limited", time, torch.device("cpu"))
    lengths = torch.tensor([8, 2, 0])
    rel_attention(q, k, v, p, u_bias, v_bias, lengths, visible=visible)[0].sum().backward()
    for each in (q, k, v, p, u_bias, v_bias):
        assert each.grad is not None
        assert each.grad.isfinite().all()
    assert not k.grad[1].any()  # type: ignore[index]


def test_positions_are_sines_and_cosines_in_turn() -> None:
    found = sinusoids(torch.tensor([3.0, -2.0]), 6)
    for row, position in enumerate((3, -2)):
        for pair in range(3):
            wave = position / 10000 ** (2 * pair / 6)
            assert found[row, 2 * pair].item() == pytest.approx(math.sin(wave), abs=1e-6)
            assert found[row, 2 * pair + 1].item() == pytest.approx(math.cos(wave), abs=1e-6)
