"""The kernels of the separable sub-block on a GPU, against float64."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from paceline.recipes.speech.fast import fused
from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet import depthwise, norm, ops, reference
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.network.encoder import Encoder
from paceline.speed.layers.kernels import ways
from tests.recipes.speech.kernels.quartznet.separable import Case, distance, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
BF16, SUMS = 2e-3, 1e-5
ALL_WAYS = ways.Ways(**{field.name: True for field in fields(ways.Ways)})


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What a kernel does not write is nan."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def check(case: Case) -> None:
    active = reference.activated(case.x, case.affine, case.lengths_in)
    plain = Case(**{**case.__dict__, "x": active, "affine": None, "moments": None, "added": None}).exact()
    out = case.forward(depthwise.forward)
    assert distance(out, plain.forward(reference.depthwise_forward)) <= BF16
    assert torch.equal(out, case.forward(depthwise.forward))
    data, weight, sums = case.backward(depthwise.backward)
    exact = plain.backward(reference.depthwise_backward)
    expected, _, expected_sums = case.exact().backward(reference.depthwise_backward)
    assert distance(data, expected) <= BF16
    assert distance(weight, exact[1]) <= SUMS
    if case.affine is not None:
        assert distance(sums, expected_sums) <= SUMS
    data_again, *again = case.backward(depthwise.backward)
    assert torch.equal(data_again, data)
    assert torch.equal(again[0], weight)
    assert torch.equal(again[1], sums) or case.affine is None
    _, alone, _ = case.backward(depthwise.backward, needs_data=False)
    assert distance(alone, exact[1]) <= SUMS


@pytest.mark.parametrize("kernel", range(1, 96, 2))
def test_every_filter(kernel: int) -> None:
    dice = random.Random(kernel)
    check(
        make_case(
            kernel,
            frames=dice.randint(60, 500),
            batch=dice.randint(1, 70),
            channels=dice.choice([16, 48, 64]),
            has_affine=kernel % 4 == 1,
            has_added=kernel % 3 == 0,
            device="cuda",
            seed=kernel,
        )
    )


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="chosen on Hopper alone"
)
@pytest.mark.parametrize("kernel", range(1, 98, 4))
@pytest.mark.parametrize("way", [ways.Ways(), ALL_WAYS], ids=["plain", "all"])
def test_backward_as_a_stream(kernel: int, way: ways.Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few channels and short utterances too, for which it is not chosen."""
    dice = random.Random(kernel)
    dilation = 2 if kernel <= 47 and kernel % 3 == 0 else 1
    taken: list[tiles.BackwardStreaming] = []
    decide = tiles.backward_streaming

    def of_long_ones(kernel: int, stride: int, dilation: int, channels: int, batch: int, row: int) -> Any:
        way = decide(kernel, stride, dilation, 512, 64, 848)
        assert way is not None
        taken.append(replace(way, groups=1 + batch % 2))
        return taken[-1]

    monkeypatch.setattr(depthwise.tiles, "backward_streaming", of_long_ones)
    for has_affine in (True, False):
        case = make_case(
            kernel,
            dilation=dilation,
            frames=dice.randint(15, 500),
            batch=dice.randint(1, 130),
            channels=dice.choice([16, 48]),
            has_affine=has_affine,
            has_added=dice.random() < 0.5,
            device="cuda",
            seed=kernel,
        )
        if kernel % 8 == 1:  # behind the longest there is a whole tile and more
            case.lengths_in = case.lengths_out = case.lengths_in // 3
            case.g = case.g * reference.held(case.lengths_out, case.g.shape[-1])
        with ways.using(way):
            check(case)
    assert taken


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="chosen on Hopper alone"
)
@pytest.mark.parametrize("kernel", range(1, 130, 8))
def test_forward_fetched(kernel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plain stream, bit for bit, at any batch and length, and with all tiles whole or none."""
    dice = random.Random(kernel)
    decide = tiles.streaming
    monkeypatch.setattr(
        depthwise.tiles, "streaming", lambda kernel, stride, dilation, batch: decide(kernel, 1, dilation, 64)
    )
    for has_affine, is_whole in ((True, True), (True, False), (False, False)):
        batch, frames = dice.randint(1, 130), dice.randint(15, 500)
        case = make_case(
            kernel, frames=frames, batch=batch, channels=16, has_affine=has_affine, device="cuda", seed=kernel
        )
        if is_whole:
            case.lengths_in = case.lengths_out = torch.full_like(case.lengths_in, frames)
        with ways.using(ways.Ways()):
            plain = case.forward(depthwise.forward)
        for is_turned in (False, True):
            with ways.using(ways.Ways(fetched=True, turned=is_turned)):
                assert torch.equal(case.forward(depthwise.forward), plain)


@pytest.mark.parametrize("frames", [15, 333, 1100])
def test_flat_statistics(frames: int) -> None:
    case = make_case(1, frames=frames, batch=133, channels=48, device="cuda")
    y = ((case.x + 30) * reference.held(case.lengths_in, case.x.shape[-1])).bfloat16()
    weight, bias = torch.rand(48, device="cuda"), torch.rand(48, device="cuda")
    expected = reference.statistics(y.double(), case.lengths_in, frames, weight.double(), bias.double(), 1e-3)
    with ways.using(ways.Ways(flat=True)):
        found = norm.statistics(y, case.lengths_in, frames, weight, bias, 1e-3)
        again = norm.statistics(y, case.lengths_in, frames, weight, bias, 1e-3)
    assert max(map(distance, found, expected)) <= SUMS
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize(("stride", "dilation"), [(2, 1), (4, 1), (1, 2), (1, 3)])
@pytest.mark.parametrize("kernel", [1, 11, 33, 87])
def test_strides_and_dilations(kernel: int, stride: int, dilation: int) -> None:
    for seed, has_affine in enumerate((True, False)):
        check(
            make_case(
                kernel,
                stride=stride,
                dilation=dilation,
                frames=211 + 7 * seed,
                batch=37,
                channels=16,
                has_affine=has_affine,
                device="cuda",
                seed=seed,
            )
        )


@pytest.mark.parametrize("frames", [15, 16, 333, 1100])
def test_batch_norm(frames: int) -> None:
    case = make_case(1, frames=frames, batch=33, channels=48, device="cuda")
    y, lengths = case.x * reference.held(case.lengths_in, case.x.shape[-1]) + 0, case.lengths_in
    y = ((y + 3) * reference.held(lengths, y.shape[-1])).bfloat16()
    weight, bias = torch.rand(48, device="cuda"), torch.rand(48, device="cuda")
    found = norm.statistics(y, lengths, frames, weight, bias, 1e-3)
    expected = reference.statistics(y.double(), lengths, frames, weight.double(), bias.double(), 1e-3)
    assert max(map(distance, found, expected)) <= SUMS
    h, other = case.g[..., : y.shape[-1]].contiguous(), (y * 0.5).bfloat16()
    sums = torch.randn(2, 48, device="cuda") * 100
    wide = [each.double() for each in (h, sums, y, *found)]
    assert (
        distance(
            norm.apply_backward(h, sums, y, *found, lengths, frames)[0],
            reference.apply_backward(*wide, lengths, frames)[0],
        )
        <= BF16
    )
    for frames_out in (None, frames):
        out = norm.join(y, found.affine, other, found.affine, lengths, frames_out)
        exact = reference.join(
            y.double(), found.affine.double(), other.double(), found.affine.double(), lengths, frames_out
        )
        assert distance(out, exact) <= BF16
        g = torch.randn_like(out)
        pair = (*found, other, *found)
        ours = norm.join_backward(g, y, *pair, lengths, is_packed=frames_out is None)
        theirs = reference.join_backward(
            g.double(), y.double(), *(each.double() for each in pair), lengths, is_packed=frames_out is None
        )
        assert distance(ours[0], theirs[0]) <= BF16
        assert max(map(distance, ours[1:], theirs[1:])) <= SUMS


def make_encoder() -> Encoder:
    torch.manual_seed(0)
    blocks = [
        {"filters": 64, "kernel": 11, "stride": 2, "separable": True},
        {"filters": 64, "kernel": 33, "repeat": 2, "residual": True, "separable": True},
        {"filters": 128, "kernel": 75, "repeat": 2, "residual": True, "separable": True},
        {"filters": 128, "kernel": 87, "dilation": 2, "separable": True},
        {"filters": 256, "kernel": 1},
    ]
    return Encoder(read_network({"features": {"n_fft": 512}, "blocks": blocks})).cuda().train()


def gradients(encoder: Encoder, mels: Tensor, lengths: Tensor, run: Any = None) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16, enabled=mels.dtype is torch.float32):
        out, after = (encoder if run is None else run)(mels, lengths)
    mask = torch.arange(out.shape[-1], device="cuda") < after[:, None]
    factors = torch.arange(out.numel(), device="cuda").sin().view_as(out)  # no dice: they cannot be recorded
    found = torch.autograd.grad(
        ((out.float() if out.dtype is torch.bfloat16 else out) * factors * mask[:, None]).sum(),
        list(encoder.parameters()),
    )
    return list(found)


@pytest.mark.parametrize("way", [ways.Ways(), ALL_WAYS], ids=["plain", "all"])
def test_encoder_is_as_right_as_the_plain_one(way: ways.Ways) -> None:
    plain = make_encoder()
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    assert fused.accelerate(ours) == []
    mels, lengths = torch.randn(70, 64, 333, device="cuda"), torch.randint(100, 334, (70,), device="cuda")
    expected = gradients(exact, mels.double(), lengths)
    far = []
    for encoder in (ours, plain):
        with ways.using(way):
            found = gradients(encoder, mels, lengths)
        far.append(
            distance(torch.cat([each.flatten() for each in found]), torch.cat([each.flatten() for each in expected]))
        )
    assert far[0] <= 1.2 * far[1]
    for (name, found), wanted in zip(ours.named_buffers(), exact.buffers(), strict=True):
        assert distance(found, wanted) < 2e-2, name


def test_encoder_under_compile_and_in_a_graph() -> None:
    ours = make_encoder()
    fused.accelerate(ours)
    mels, lengths = torch.randn(4, 64, 96, device="cuda"), torch.tensor([96, 50, 80, 10], device="cuda")
    expected = gradients(ours, mels, lengths)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(gradients(ours, mels, lengths, compiled), expected, strict=True):
        assert torch.equal(found, wanted)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(ours, mels, lengths)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = gradients(ours, mels, lengths)
    for _ in range(2):
        graph.replay()
        for found, wanted in zip(recorded, expected, strict=True):
            assert torch.equal(found, wanted)


def test_operators_keep_their_word() -> None:
    case = make_case(5, batch=2, channels=16, device="cuda")
    weight = torch.randn(32, 16, 1, device="cuda", requires_grad=True)
    norm_weight = torch.rand(32, device="cuda", requires_grad=True)
    torch.library.opcheck(
        ops.separable.overload,
        (
            *(case.x, None, None, case.lengths_in, case.lengths_out, case.weight, weight, norm_weight, norm_weight),
            *(None, None, None, weight.detach().squeeze(2).bfloat16(), None, None, 50, 1, 1, 1e-3),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )
