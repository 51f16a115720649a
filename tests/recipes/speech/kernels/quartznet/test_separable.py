"""The kernels of the separable sub-block in Triton's interpreter, against their reference; that against autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet import reference
from paceline.speed.layers.kernels import ways
from tests.recipes.speech.kernels.quartznet.separable import distance, make_case

TRUNCATED = 1.6e-2
"""Triton's interpreter cuts bfloat16 off where hardware rounds, before a product and after it."""
SUMS = 1e-5


@given(
    st.integers(0, 20).map(lambda half: 2 * half + 1),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    st.integers(1, 60),
    st.booleans(),
)
@settings(max_examples=40)
def test_reference_is_a_convolution(kernel: int, steps: tuple[int, int], frames: int, has_added: bool) -> None:
    """In float64 against autograd through batch norm's output, ReLU, mask, convolution, mask."""
    stride, dilation = steps
    case = make_case(kernel, stride=stride, dilation=dilation, frames=frames, has_added=has_added, seed=kernel).exact()
    assert case.affine is not None
    assert case.moments is not None
    u = (case.x * case.affine[0][:, None, None] + case.affine[1][:, None, None]).requires_grad_()
    weight = case.weight.clone().requires_grad_()
    active = (u.relu() * reference.held(case.lengths_in, u.shape[-1]))[..., :frames]
    pad = tiles.padding(kernel, dilation)
    out = F.conv1d(active.transpose(0, 1), weight, None, stride, pad, dilation, groups=2).transpose(0, 1)
    out = F.pad(out, (0, case.row_out - out.shape[-1])) * reference.held(case.lengths_out, case.row_out)
    assert distance(case.forward(reference.depthwise_forward), out.detach()) < 1e-12
    total = (out * case.g).sum() + (0.0 if case.added is None else (active * case.added[..., :frames]).sum())
    of_u, of_weight = torch.autograd.grad(total, (u, weight))
    data, found, sums = case.backward(reference.depthwise_backward)
    assert distance(data, of_u) < 1e-12
    assert distance(found, of_weight.flatten(1)) < 1e-12
    expected = torch.stack([(of_u * (case.x - case.moments[0][:, None, None])).sum((1, 2)), of_u.sum((1, 2))])
    assert distance(sums, expected) < 1e-11


@pytest.fixture
def kernels(interpreted: None) -> Any:
    """The modules of the kernels."""
    from paceline.recipes.speech.kernels.quartznet import depthwise, norm, stream

    return depthwise, stream, norm


CASES: list[dict[str, Any]] = [
    {"kernel": 5, "has_added": True},
    {"kernel": 1, "frames": 17, "has_affine": False},
    {"kernel": 33, "stride": 2, "frames": 75},
    {"kernel": 11, "dilation": 2, "has_affine": False},
    {"kernel": 7, "stride": 2, "frames": 41},
    {"kernel": 75, "frames": 90},
]


@pytest.mark.parametrize("of", CASES, ids=str)
@pytest.mark.parametrize("way", [tiles.Tiling(16, 16, 16, 2), tiles.Tiling(16, 32, 16, 1)], ids=str)
def test_general_kernels(kernels: Any, of: dict[str, Any], way: tiles.Tiling) -> None:
    depthwise, _, _ = kernels
    case = make_case(**of)
    assert distance(case.forward(depthwise.forward, tiling=way), case.forward(reference.depthwise_forward)) < TRUNCATED
    data, weight, sums = case.backward(depthwise.backward, tiling=way)
    expected, of_weight, expected_sums = case.backward(reference.depthwise_backward)
    assert distance(data, expected) < TRUNCATED
    _, alone, _ = case.backward(depthwise.backward, needs_data=False, tiling=way)
    assert torch.equal(alone, weight)
    if case.affine is None:  # nothing is rounded before the product
        assert distance(weight, of_weight) < SUMS
    else:
        assert distance(weight, of_weight) < TRUNCATED
        assert distance(sums, expected_sums) < SUMS


@pytest.mark.parametrize(
    ("kernel", "dilation", "way"),
    [
        (5, 1, tiles.Streaming(16, 16, 16)),
        (33, 1, tiles.Streaming(16, 16, 16)),
        (63, 1, tiles.Streaming(16, 32, 16)),
        (7, 2, tiles.Streaming(16, 16, 16)),
        (1, 1, tiles.Streaming(16, 16, 16)),
    ],
)
def test_stream(kernels: Any, kernel: int, dilation: int, way: tiles.Streaming) -> None:
    from paceline.recipes.speech.kernels.quartznet import stream_fetched

    _, stream, _ = kernels
    for batch, has_affine, is_turned in ((3, True, True), (20, False, False)):
        case = make_case(kernel, dilation=dilation, frames=70, batch=batch, has_affine=has_affine)
        with ways.using(ways.Ways(turned=is_turned)):
            found = stream.forward(case.x, case.affine, case.lengths_in, case.weight, dilation, way)
            fetched = stream_fetched.forward(case.x, case.affine, case.lengths_in, case.weight, dilation, way)
        assert distance(found, case.forward(reference.depthwise_forward)) < TRUNCATED
        assert torch.equal(fetched, found)


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [([70, 70, 70], "all"), ([0, 0, 0], "nothing"), ([64, 48, 50], "up to the middle"), ([3, 70, 16], "one, or none")],
    ids=str,
)
def test_tiles_that_need_no_mask(kernels: Any, lengths: list[int], whole: str) -> None:
    """Groups of utterances whose shortest and longest end in different tiles; what is behind a length is nan."""
    from paceline.recipes.speech.kernels.quartznet import stream_fetched

    case = make_case(9, frames=70, batch=3)
    case.lengths_in = case.lengths_out = torch.tensor(lengths, dtype=torch.int32)
    expected = case.forward(reference.depthwise_forward)
    behind = ~reference.held(case.lengths_in, case.x.shape[-1]).expand_as(case.x)
    case.x = case.x.masked_fill(behind, float("nan"))
    way = tiles.Streaming(16, 16, 16)
    found = stream_fetched.forward(case.x, case.affine, case.lengths_in, case.weight, 1, way)
    assert distance(found, expected) < TRUNCATED
    assert not found[behind].any()


@pytest.mark.parametrize("has_affine", [True, False])
@pytest.mark.parametrize(
    ("kernel", "dilation", "frames", "batch", "way"),
    [
        (1, 1, 17, 3, tiles.BackwardStreaming(16, 16, 16, 0, groups=1)),
        (5, 1, 70, 20, tiles.BackwardStreaming(16, 16, 32, 0, groups=1)),
        (7, 2, 70, 35, tiles.BackwardStreaming(16, 16, 32, 0, groups=2)),
        (11, 2, 33, 20, tiles.BackwardStreaming(16, 32, 64, 0, groups=2)),
        (33, 1, 61, 16, tiles.BackwardStreaming(16, 16, 32, 16, groups=1)),
        (41, 2, 150, 5, tiles.BackwardStreaming(16, 64, 128, 32, groups=1)),
        (75, 1, 131, 33, tiles.BackwardStreaming(16, 64, 128, 32, groups=3)),
        (95, 1, 190, 3, tiles.BackwardStreaming(16, 64, 128, 32, groups=1)),
    ],
)
def test_stream_backward(
    kernels: Any, kernel: int, dilation: int, frames: int, batch: int, way: tiles.BackwardStreaming, has_affine: bool
) -> None:
    from paceline.recipes.speech.kernels.quartznet import stream_backward

    def backward(*given: Any, needs_data: bool) -> Any:
        g, x, affine, moments, added, lengths, _, weight, _, _ = given
        return stream_backward.backward(
            *(g, x, affine, moments, added, lengths, weight, dilation, way), needs_data=needs_data
        )

    for has_added, kernels_in_use in ((True, ways.Ways()), (False, ways.MEASURED)):
        case = make_case(
            kernel, dilation=dilation, frames=frames, batch=batch, has_affine=has_affine, has_added=has_added
        )
        if kernels_in_use.cut:  # behind the longest there is more than a tile
            case.lengths_in = case.lengths_out = case.lengths_in // 4
            case.g = case.g * reference.held(case.lengths_out, case.g.shape[-1])
        with ways.using(kernels_in_use):
            data, weight, sums = case.backward(backward)
        behind = ~reference.held(case.lengths_in, data.shape[-1]).expand_as(data)
        expected, of_weight, expected_sums = case.backward(reference.depthwise_backward)
        assert distance(data, expected) < TRUNCATED
        assert not data[behind].any()
        assert distance(weight, of_weight) < (TRUNCATED if has_affine else SUMS)
        if has_affine:
            assert distance(sums, expected_sums) < SUMS
        nothing, alone, _ = case.backward(backward, needs_data=False)
        assert not nothing.numel()
        assert torch.equal(alone, weight)


@pytest.mark.parametrize(("batch", "frames"), [(1, 5), (35, 150), (64, 128), (70, 250)])
def test_flat_statistics(kernels: Any, batch: int, frames: int) -> None:
    """Less than a piece, a part, exactly one, and several; far from zero, where sums of squares cancel."""
    _, _, norm = kernels
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(frames // 2, frames + 1, (batch,), dtype=torch.int32, generator=dice)
    row = tiles.padded_frames(frames)
    y = (torch.randn(3, batch, row, generator=dice) + 30).bfloat16() * reference.held(lengths, row)
    weight, bias = torch.rand(3, generator=dice), torch.rand(3, generator=dice)
    expected = reference.statistics(y.double(), lengths, frames, weight.double(), bias.double(), 1e-3)
    with ways.using(ways.Ways(flat=True)):
        found = norm.statistics(y, lengths, frames, weight, bias, 1e-3)
    assert max(map(distance, found, expected)) < SUMS
    assert ways.in_use() == ways.MEASURED


@pytest.fixture(params=[ways.Ways(), ways.MEASURED], ids=["plain", "measured"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    with ways.using(request.param):
        yield


def test_utterances_come_back_in_their_places(kernels: Any) -> None:
    """The end of an encoder whose utterances lie by length."""
    _, _, norm = kernels
    case = make_case(1, frames=70, batch=37, channels=3)
    assert case.affine is not None
    assert case.moments is not None
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    given = case.x, case.affine, None, None, case.lengths_in, 69, order
    out = norm.join(*given)
    assert distance(out, reference.join(*given)) < TRUNCATED
    assert torch.equal(out[order.long()], norm.join(*given[:-1]))
    pair = (case.x, case.affine, case.moments, None, None, None, case.lengths_in, order)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = norm.join_backward(g, *pair, is_packed=False)
    expected = reference.join_backward(g, *pair, is_packed=False)
    assert distance(found[0], expected[0]) < TRUNCATED
    assert max(map(distance, found[1:], expected[1:])) < SUMS


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("batch", "frames"), [(1, 5), (35, 150)])
def test_batch_norm(kernels: Any, batch: int, frames: int) -> None:
    _, _, norm = kernels
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, frames + 1, (batch,), dtype=torch.int32, generator=dice)
    lengths[0] = frames
    row = tiles.padded_frames(frames)

    def draw() -> torch.Tensor:
        return (torch.randn(3, batch, row, generator=dice) + 3).bfloat16() * reference.held(lengths, row)

    y, other, h = draw(), draw(), draw()
    weight, bias, sums = torch.rand(3, generator=dice), torch.rand(3, generator=dice), torch.randn(2, 3, generator=dice)
    ours = norm.statistics(y, lengths, frames, weight, bias, 1e-3)
    theirs = reference.statistics(y, lengths, frames, weight, bias, 1e-3)
    assert max(map(distance, ours, theirs)) < SUMS
    behind = ~reference.held(lengths, row).expand_as(h)  # of gradients, what lies there is not read
    poisoned = h.masked_fill(behind, float("nan"))
    found = norm.apply_backward(poisoned, sums, y, *ours, lengths, frames)
    expected = reference.apply_backward(h, sums, y, *theirs, lengths, frames)
    assert distance(found[0], expected[0]) < TRUNCATED
    assert not found[0][behind].any()
    assert not norm.join_backward(poisoned, y, *ours, other, *ours, lengths)[0][behind].any()
    assert max(map(distance, found[1:], expected[1:])) < SUMS
    for frames_out in (None, frames):
        out = norm.join(y, ours.affine, other, ours.affine, lengths, frames_out)
        assert distance(out, reference.join(y, ours.affine, other, ours.affine, lengths, frames_out)) < TRUNCATED
        for pair in ((*ours, other, *ours), (*ours, None, None, None)):
            found = norm.join_backward(out, y, *pair, lengths, is_packed=frames_out is None)
            expected = reference.join_backward(out, y, *pair, lengths, is_packed=frames_out is None)
            assert distance(found[0], expected[0]) < TRUNCATED
            assert max(map(distance, found[1:], expected[1:])) < SUMS
