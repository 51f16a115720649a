"""Products over channels of tiles that hold speech: lists and sums in Triton's interpreter, all of it on a GPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

import triton

from paceline.recipes.speech.kernels.quartznet import product, reference
from paceline.recipes.speech.kernels.tiles import num_listed, padded_frames
from paceline.speed.layers.kernels import ways
from tests.recipes.speech.kernels.quartznet.separable import distance

BF16, SUMS = 2e-3, 1e-5
WIDTH = product.WIDTH
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


class Case(NamedTuple):
    """One product, as a network in training would have it."""

    matrix: Tensor
    x: Tensor
    g: Tensor
    lengths: Tensor
    frames: int
    weight: Tensor
    bias: Tensor


def make_case(filters: int, channels: int, batch: int, frames: int, device: str = "cpu", level: float = 0.0) -> Case:
    dice = torch.Generator().manual_seed(filters + channels + batch + frames)
    row = padded_frames(frames)
    lengths = torch.randint(frames // 2, frames + 1, (batch,), generator=dice, dtype=torch.int32)
    lengths[0] = frames
    if batch > 1:
        lengths[-1] = 0  # an utterance without frames
    held = reference.held(lengths, row)
    x = ((torch.randn(channels, batch, row, generator=dice) + level) * held).bfloat16()
    g = (torch.randn(filters, batch, row, generator=dice) * held).bfloat16()
    matrix = (torch.randn(filters, channels, generator=dice) * channels**-0.5).bfloat16()
    weight, bias = torch.rand(2, filters, generator=dice) + 0.5
    case = Case(matrix, x, g, lengths, frames, weight, bias)
    return Case(*(each.to(device) if isinstance(each, Tensor) else each for each in case))


def expected_list(lengths: Tensor, row: int, width: int) -> list[int]:
    num_times = -(-row // width)
    reached = [(b, t) for b, length in enumerate(lengths.tolist()) for t in range(num_times) if t * width < length]
    others = [(b, t) for b, length in enumerate(lengths.tolist()) for t in range(num_times) if t * width >= length]
    return [len(reached), *(b * 65536 + t for b, t in reached + others)]


def check_lists(case: Case) -> None:
    row = case.x.shape[-1]
    found = product.list_tiles(case.lengths, row)
    assert len(found) == num_listed(len(case.lengths), row)
    assert found.tolist() == expected_list(case.lengths, row, WIDTH) + expected_list(case.lengths, row, WIDTH // 2)


@pytest.mark.parametrize(("batch", "frames"), [(1, 15), (3, 150), (5, 128), (70, 300)])
@pytest.mark.usefixtures("interpreted")
def test_tiles_with_speech_come_first(batch: int, frames: int) -> None:
    check_lists(make_case(1, 1, batch, frames))


@pytest.mark.parametrize("level", [0.0, 30.0])
@pytest.mark.parametrize("step", [1, 3, 33])
@pytest.mark.usefixtures("interpreted")
def test_sums_of_programs_become_statistics(step: int, level: float) -> None:
    """Each program has the tiles `begin`, `begin + step`, ...; some have none."""
    case = make_case(8, 16, 4, 200, level=level)
    held = reference.held(case.lengths, case.x.shape[-1])
    y = ((torch.randn(8, *case.x.shape[1:], generator=torch.Generator().manual_seed(0)) + level) * held).bfloat16()
    tiles = product.list_tiles(case.lengths, y.shape[-1])
    wide = torch.nn.functional.pad(y.float(), (0, WIDTH))
    parts = torch.full((step, 3, 8), torch.nan)
    for begin in range(min(step, int(tiles[0]))):
        mine = tiles[1 + begin : 1 + int(tiles[0]) : step].tolist()
        values = [wide[:, tile >> 16, (tile & 65535) * WIDTH :][:, :WIDTH] for tile in mine]
        pivot = values[0].mean(1)
        away = torch.stack(values) - pivot[:, None]
        parts[begin] = torch.stack([pivot, away.sum((0, 2)), (away * away).sum((0, 2))])
    affine, moments = torch.empty(2, 8), torch.empty(3, 8)
    product._combine[(1,)](
        *(parts, tiles, case.weight, case.bias, affine, moments, 8, step, 4 * case.frames, 1e-3),
        WIDTH=WIDTH,
        STEPS=triton.next_power_of_2(step),
        CHANNELS=8,
    )
    expected = reference.statistics(
        y.double(), case.lengths, case.frames, case.weight.double(), case.bias.double(), 1e-3
    )
    assert distance(affine, expected[0]) <= SUMS
    assert distance(moments, expected[1]) <= SUMS


@pytest.mark.usefixtures("interpreted")
def test_weight_gradient_reads_tiles_with_speech_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "PROGRAMS", 5)  # parts of unequal length
    case = make_case(128, 256, 3, 150)
    tiles = product.list_tiles(case.lengths, case.x.shape[-1])
    expected = case.g.double().flatten(1) @ case.x.double().flatten(1).t()
    assert distance(product.weight_gradient(case.g, case.x, tiles), expected) <= SUMS


def test_products_that_it_is_for() -> None:
    assert product.fits(512, 512)
    assert product.fits(1024, 512)
    assert product.fits(512, 256)
    assert not product.fits(256, 64)
    assert not product.fits(128, 256)
    assert not product.fits(512, 1024)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What a kernel does not write is nan."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def of_exact(case: Case) -> tuple[Tensor, Tensor]:
    wide = case.matrix.double()
    return torch.einsum("fc,cbt->fbt", wide, case.x.double()), torch.einsum("fc,fbt->cbt", wide, case.g.double())


@on_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("filters", "channels"), [(512, 512), (256, 256), (512, 256), (1024, 512), (768, 256)])
def test_against_float64(filters: int, channels: int) -> None:
    dice = random.Random(filters * channels)
    for batch, level in ((1, 0.0), (dice.randint(2, 70), 0.0), (dice.randint(100, 130), 20.0)):
        case = make_case(filters, channels, batch, dice.randint(15, 500), "cuda", level)
        check_lists(case)
        tiles = product.list_tiles(case.lengths, case.x.shape[-1])
        more = (case.matrix, case.x, tiles, case.frames, case.weight, case.bias, 1e-3)
        y, statistics = product.forward(*more)
        exact, exact_data = of_exact(case)
        assert distance(y, exact) <= BF16
        assert bool((y.masked_fill(reference.held(case.lengths, y.shape[-1]), 0.0) == 0).all())
        expected = reference.statistics(
            y.double(), case.lengths, case.frames, case.weight.double(), case.bias.double(), 1e-3
        )
        assert max(map(distance, statistics, expected)) <= SUMS
        again, statistics_again = product.forward(*more)
        assert torch.equal(y, again)
        assert all(map(torch.equal, statistics, statistics_again))
        if product.fits(channels, filters):
            data = product.data_gradient(case.matrix, case.g, tiles)
            assert distance(data, exact_data) <= BF16
            assert torch.equal(data, product.data_gradient(case.matrix, case.g, tiles))
        gradient = product.weight_gradient(case.g, case.x, tiles)
        assert distance(gradient, case.g.double().flatten(1) @ case.x.double().flatten(1).t()) <= SUMS
        assert torch.equal(gradient, product.weight_gradient(case.g, case.x, tiles))


@on_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
def test_encoder_is_as_right_as_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.recipes.speech.fast import fused
    from paceline.recipes.speech.network.config import read_network
    from paceline.recipes.speech.network.encoder import Encoder
    from tests.recipes.speech.kernels.quartznet.test_separable_gpu import gradients

    blocks = [
        {"filters": 256, "kernel": 11, "stride": 2, "separable": True},
        {"filters": 256, "kernel": 33, "repeat": 2, "residual": True, "separable": True},
        {"filters": 512, "kernel": 75, "repeat": 2, "residual": True, "separable": True},
        {"filters": 1024, "kernel": 1},
    ]
    torch.manual_seed(0)
    plain = Encoder(read_network({"features": {"n_fft": 512}, "blocks": blocks})).cuda().train()
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    assert fused.accelerate(ours) == []
    mels, lengths = torch.randn(70, 64, 333, device="cuda"), torch.randint(100, 334, (70,), device="cuda")
    expected = torch.cat([each.flatten() for each in gradients(exact, mels.double(), lengths)])
    launched = []
    launch = product._launch
    monkeypatch.setattr(product, "_launch", lambda *args: (launched.append(args), launch(*args))[1])
    monkeypatch.setattr(product, "gains_weights", lambda filters, channels, *_: channels % 256 == 0)
    with ways.using(replace(ways.MEASURED, listed=True, listed_weights=True)):
        found = torch.cat([each.flatten() for each in gradients(ours, mels, lengths)])
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        again = torch.cat([each.flatten() for each in gradients(ours, mels, lengths, compiled)])
    beside = torch.cat([each.flatten() for each in gradients(plain, mels, lengths)])
    assert launched
    assert distance(found, expected) <= 1.2 * distance(beside, expected)
    assert torch.equal(found, again)
