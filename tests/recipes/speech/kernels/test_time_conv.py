"""The convolution over time of (batch, time, channels), against PyTorch's own of (batch, channels, time)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from paceline.recipes.speech.kernels.time_conv import time_conv


@given(
    time=st.integers(1, 40),
    half=st.integers(0, 4),
    dilation=st.integers(1, 4),
    stride=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    more=st.integers(-1, 2),
)
@settings(max_examples=60)
def test_is_a_convolution(time: int, half: int, dilation: int, stride: int, groups: int, more: int) -> None:
    """Every length, odd ones too, and paddings that a dilation does and does not divide."""
    kernel, padding = 2 * half + 1, max(0, dilation * half + more)
    if time + 2 * padding < dilation * (kernel - 1) + 1:
        return
    dice = torch.Generator().manual_seed(time)
    x = torch.randn(2, time, 4, generator=dice, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4 // groups, kernel, generator=dice, dtype=torch.float64, requires_grad=True)
    expected = F.conv1d(x.transpose(1, 2), weight, None, stride, padding, dilation, groups).transpose(1, 2)
    found = time_conv(x, weight, stride, padding, dilation, groups)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)
    g = torch.randn(found.shape, generator=dice, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, weight), g), torch.autograd.grad(expected, (x, weight), g), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("time", [12, 13])
@pytest.mark.parametrize("dilation", [1, 2])
def test_nothing_is_dilated_or_copied_that_need_not_be(dilation: int, time: int) -> None:
    x = torch.randn(2, time, 4).bfloat16().requires_grad_()
    weight = torch.randn(6, 4, 5, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        y = time_conv(x, weight, 1, 2 * dilation, dilation, 1)
        y.backward(torch.ones_like(y))
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert weight.grad.is_contiguous()
    events = list(seen.events() or [])
    convolutions = [each.concrete_inputs for each in events if each.name.startswith("aten::convolution")]
    assert [each[5 if len(each) == 9 else 6] for each in convolutions] == [[1, 1], [1, 1]], "dilations of both passes"
    # Forward the weights, backward their gradient, in one pass each, with the change of dtype.
    copies = [each.input_shapes[0] for each in events if each.name in ("aten::copy_", "aten::_to_copy")]
    of_weights = [shape for shape in copies if shape in ([6, 5, 4], [6, 4, 5])]
    assert of_weights == [[6, 5, 4], [6, 4, 5]]
    if time % dilation == 0:
        # A convolution of the library may copy its weights, with a dimension of one, for itself: some CPUs need that.
        of_activations = [shape for shape in copies if [size for size in shape if size > 1] not in of_weights]
        assert of_activations == [], "activations stay where they are"
