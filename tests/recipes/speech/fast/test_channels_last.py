"""An encoder trained with channels last in memory, beside the plain one."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.recipes.speech.fast import accelerate, channels_last
from paceline.recipes.speech.kernels.time_conv import time_conv_forward
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.network.encoder import Encoder
from paceline.speed.autotune.candidates import Candidate
from paceline.train.autotune import autotuner
from paceline.world.link import Link
from tests.bf16 import needs_bf16
from tests.ranks import run_ranks
from tests.recipes.speech import tiny
from tests.recipes.speech.fast.test_fused import BLOCKS as SEPARABLE
from tests.recipes.speech.fast.test_fused import LENGTHS, MELS, assert_same, make_encoder
from tests.recipes.speech.kernels.quartznet.separable import distance
from tests.train.small import alone

DENSE: dict[str, Any] = {"repeat": 2, "residual": True, "residual_dense": True}
BLOCKS: list[dict[str, Any]] = [
    {"filters": 32, "kernel": 11, "stride": 2},
    {"filters": 32, "kernel": 11, **DENSE},
    {"filters": 48, "kernel": 13, **DENSE},
    {"filters": 32, "kernel": 7, "dilation": 2},
    {"filters": 64, "kernel": 1},
]


@pytest.mark.parametrize("conv_mask", [True, False])
@pytest.mark.parametrize(
    "change",
    [{}, {"separable": True}, {"groups": 2}, {"se": True}],
    ids=["jasper", "separable", "groups", "excited"],
)
def test_same_as_the_plain_encoder(change: dict[str, Any], conv_mask: bool) -> None:
    blocks = [BLOCKS[0], {**BLOCKS[1], **change}, *BLOCKS[2:]]
    plain = make_encoder(blocks, conv_mask=conv_mask).double()
    ours = copy.deepcopy(plain)
    channels_last.accelerate(ours)
    assert_same(plain, ours, channels_last.encode)


ADDED: dict[str, Any] = {"residual": True}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "not dense": [BLOCKS[0], {"filters": 32, "kernel": 5, **ADDED}, {"filters": 48, "kernel": 5, **ADDED}, BLOCKS[4]],
    "dense from the first block on": [BLOCKS[1], BLOCKS[2], BLOCKS[4]],
    "two chains": [
        *(BLOCKS[0], BLOCKS[1], BLOCKS[2], {"filters": 40, "kernel": 5, **ADDED}),
        *({"filters": 24, "kernel": 5, **DENSE}, {"filters": 16, "kernel": 3, **DENSE}, BLOCKS[4]),
    ],
    "some layers left to PyTorch": [BLOCKS[0], BLOCKS[1], {**BLOCKS[2], "se": True}, BLOCKS[1], BLOCKS[4]],
}


@pytest.mark.parametrize("has_peers", [False, True])
@pytest.mark.parametrize("frozen", ["", "residuals", "norm", "blocks.1", "blocks.0"])
@pytest.mark.parametrize("name", CHAINS)
def test_any_residuals_and_frozen_weights(
    name: str, frozen: str, has_peers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_last, "_has_peers", lambda: has_peers)
    plain = make_encoder(CHAINS[name]).double()
    for each, parameter in plain.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in each)
    ours = copy.deepcopy(plain)
    outs = [plain(MELS.double(), LENGTHS), channels_last.encode(ours, MELS.double(), LENGTHS)]
    held = torch.arange(outs[0][0].shape[-1]) < outs[0][1][:, None, None]
    for out, _ in outs:
        (out * held).sin().sum().backward()
    for (each, wanted), parameter in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (parameter.grad is None) == (wanted.grad is None), each
        if parameter.grad is not None and wanted.grad is not None:
            assert torch.allclose(parameter.grad, wanted.grad, rtol=1e-8, atol=1e-9), each


class Layouts(TorchDispatchMode):
    """Of all activations that large operators take: whether a frame's channels lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].removesuffix(".default")
        if name in OPERATORS:
            each_arg = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            activations = [each for each in each_arg if isinstance(each, Tensor) and each.dim() + (name in FLAT) >= 3]
            self.seen.setdefault(name, []).extend(
                each.stride(1 if each.dim() == 4 else -1) == 1 for each in activations
            )
        assert "as_strided" not in name, "a gradient through a view that was written to"
        return func(*args, **(kwargs or {}))


FLAT = ("native_batch_norm", "native_batch_norm_backward", "_batch_norm_with_update", "batch_norm_backward")
CONVOLUTIONS, NORMS = {"time_conv", "time_conv_backward"}, {"row_norm", "row_norm_backward"}
OPERATORS = (*FLAT, *CONVOLUTIONS, *NORMS, "native_dropout", "relu", "threshold_backward")


@pytest.mark.parametrize("change", [{}, {"separable": True}, {"groups": 2}, {"se": True}])
def test_no_layer_leaves_the_layout(change: dict[str, Any]) -> None:
    """One that did would cost copies, forth and back, and nobody would notice."""
    encoder = make_encoder([BLOCKS[0], {**BLOCKS[1], **change}, *({**block, "dropout": 0.2} for block in BLOCKS[2:])])
    accelerate(encoder)
    with Layouts() as layouts, torch.autocast("cpu", torch.bfloat16):
        out, _ = encoder(MELS, LENGTHS)
        out.float().square().sum().backward()
    assert set(layouts.seen) >= CONVOLUTIONS | NORMS
    assert ("relu" in layouts.seen) == ("groups" in change or "se" in change)
    assert all(all(each) for each in layouts.seen.values()), layouts.seen


class Sums(TorchDispatchMode):
    """Counts passes that add or join rows, and products that add."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in {"addmm_", "cat"} or (name in {"add", "add_"} and args[0].dim() == 3):
            self.counts[name.rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


def test_gradients_of_a_dense_blocks_input_are_added_in_products() -> None:
    """Three inputs have 3, 2 and 1 residuals: one product each, added to the gradient of a convolution."""
    encoder = make_encoder([BLOCKS[0], *3 * [BLOCKS[1]], BLOCKS[4]])
    accelerate(encoder)
    with Sums() as sums, torch.autocast("cpu", torch.bfloat16):
        out, _ = encoder(MELS, LENGTHS)
        out.float().square().sum().backward()
    assert sums.counts == {"addmm": 3}


def test_stands_in_for_training_in_bfloat16_only() -> None:
    plain = make_encoder(BLOCKS)
    ours = copy.deepcopy(plain)
    assert accelerate(ours) == []
    assert list(ours.state_dict()) == list(plain.state_dict())
    for training, dtype in ((True, None), (True, torch.float16), (False, torch.bfloat16)):
        autocast = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
        with Layouts() as layouts, autocast, torch.no_grad():
            outs = [encoder.train(training)(MELS, LENGTHS)[0] for encoder in (ours, plain)]
        assert torch.equal(*outs)
        assert "time_conv" not in layouts.seen
    with Layouts() as layouts, torch.autocast("cpu", torch.bfloat16):
        ours.train()(MELS, LENGTHS)
    assert "time_conv" in layouts.seen


@pytest.mark.parametrize("change", [{"separable": True}, {"groups": 2}, {"se": True}])
def test_says_what_is_left_as_it_was(change: dict[str, Any]) -> None:
    (line,) = accelerate(make_encoder([BLOCKS[0], {**BLOCKS[1], **change}, *BLOCKS[2:]]))
    assert line.startswith("block 0: kernel 11 over all channels at once, not separable and ")
    assert line.endswith("; the library's convolutions instead, with channels last in memory")


def test_dropout_is_drawn_from_the_seed() -> None:
    """The same again after the same seed, other values after another, and as many as there should be."""
    ours = make_encoder([*BLOCKS[:2], {**BLOCKS[4], "dropout": 0.5}])
    accelerate(ours)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(ours(MELS, LENGTHS)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    shares = [float((out[0] > 0).double().mean()) for out in outs]
    assert all(0.15 < share < 0.35 for share in shares)


@pytest.mark.parametrize("blocks", [BLOCKS, SEPARABLE], ids=["channels last", "kernels"])
def test_frozen_batch_norm_stays_frozen(blocks: list[dict[str, Any]]) -> None:
    ours = make_encoder(blocks)
    accelerate(ours)
    norm = ours.get_submodule("blocks.1.layers.0.norm").eval()
    with torch.autocast("cpu", torch.bfloat16):
        ours(MELS, LENGTHS)
    assert int(norm.get_buffer("num_batches_tracked")) == 0
    assert torch.equal(norm.get_buffer("running_mean"), torch.zeros(32))
    assert int(ours.get_buffer("blocks.1.layers.1.norm.num_batches_tracked")) == 1


def test_operators_keep_their_word() -> None:
    x, weight = torch.randn(2, 9, 6, requires_grad=True), torch.randn(4, 3, 5, requires_grad=True)
    for figures in ((1, 2, 1, 2), (2, 2, 1, 2), (1, 4, 2, 2)):
        torch.library.opcheck(time_conv_forward.overload, (x, weight, *figures))
    torch.library.opcheck(time_conv_forward.overload, (x, torch.randn(4, 6, 5, requires_grad=True), 1, 4, 2, 1))


@pytest.mark.filterwarnings("ignore")  # of torch about its own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "blocks", [[BLOCKS[0], BLOCKS[4]], pytest.param([*BLOCKS[:2], BLOCKS[4]], marks=pytest.mark.long)], ids=len
)
def test_compiled_for_batches_of_any_size_and_length(blocks: list[dict[str, Any]]) -> None:
    """As in a run sizes and lengths are marked as changing, which PyTorch's own convolution does not survive."""
    plain = make_encoder(blocks).double()
    ours = copy.deepcopy(plain)
    compiled = torch.compile(channels_last.encode)
    torch._dynamo.utils.counters.clear()
    for batch, frames in ((3, 61), (2, 90), (4, 40)):
        mels, lengths = torch.randn(batch, 64, frames, dtype=torch.float64), torch.randint(20, frames, (batch,))

        def encode(encoder: Encoder, mels: Tensor, lengths: Tensor) -> Any:
            for tensor, sizes in ((mels, (0, 2)), (lengths, (0,))):
                torch._dynamo.maybe_mark_dynamic(tensor, sizes)
            return compiled(encoder, mels, lengths)

        assert_same(plain, ours, encode, mels, lengths)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


JASPER = {
    **tiny.NETWORK,
    "blocks": [
        {"filters": 16, "kernel": 5, "stride": 2, "dropout": 0.2},
        {"filters": 16, "kernel": 3, "dropout": 0.2, **DENSE},
        {"filters": 16, "kernel": 1},
    ],
}


def train(link: Link, data: Path, out: Path, way: Candidate, **changes: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(out))
        patched.setattr(autotuner, "why_no_kernels", lambda *_: None)
        patched.setattr(autotuner, "candidates", lambda *_, **__: [way])
        run = tiny.train(tiny.settings(data, out=out / "run", network=JASPER, level=4, **changes), link)
    assert run.stepper.precision.kernels


def train_on_ranks(link: Link, data: Path, folder: Path) -> None:
    train(link, data, folder / str(link.world.size), Candidate(2, kernels=True), epochs=2)


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    tiny.speech(tmp_path / "speech", "train", 26, seed=1)
    return tmp_path / "speech"


@needs_bf16
def test_a_run_is_the_same_on_two_ranks(tmp_path: Path, speech: Path) -> None:
    for size in (1, 2):
        run_ranks(size, train_on_ranks, speech, tmp_path)
    one, two = (tiny.losses_of(tmp_path / str(size) / "run") for size in (1, 2))
    assert one == pytest.approx(two, rel=1e-5)


@needs_bf16
def test_a_run_goes_on_where_it_was(tmp_path: Path, speech: Path) -> None:
    way, changes = Candidate(2, kernels=True), {"epochs": None, "schedule": "constant", "warmup_ratio": None}
    train(alone(), speech, tmp_path / "whole", way, steps=4, **changes)
    train(alone(), speech, tmp_path / "part", way, steps=2, **changes)
    train(alone(), speech, tmp_path / "part", way, steps=4, resume="auto", allow_change=True, **changes)
    assert tiny.losses_of(tmp_path / "whole" / "run") == tiny.losses_of(tmp_path / "part" / "run")


@pytest.mark.filterwarnings("ignore")  # of torch about its own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@needs_bf16
@pytest.mark.long  # `test_compiled_for_batches_of_any_size_and_length` stands for it otherwise
def test_a_run_is_compiled(tmp_path: Path, speech: Path) -> None:
    train(alone(), speech, tmp_path, Candidate(3, kernels=True), epochs=None, steps=2)
    assert len(tiny.losses_of(tmp_path / "run")) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_as_right_as_the_plain_one_on_a_gpu() -> None:
    torch.manual_seed(0)
    network = read_network({"features": {"n_fft": 512}, "blocks": BLOCKS})
    plain = Encoder(network).cuda().train()
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    accelerate(ours)
    mels, lengths = torch.randn(16, 64, 333, device="cuda"), torch.randint(100, 334, (16,), device="cuda")
    factors = torch.randn(16, 64, 167, device="cuda", dtype=torch.float64)

    def gradient(encoder: Encoder, mels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=mels.dtype is torch.float32):
            out, after = encoder(mels, lengths)
        held = torch.arange(167, device="cuda") < after[:, None, None]
        found = torch.autograd.grad((out * factors * held).sum(), list(encoder.parameters()))
        return torch.cat([each.flatten().double() for each in found])

    expected = gradient(exact, mels.double())
    assert distance(gradient(ours, mels), expected) <= 1.2 * distance(gradient(plain, mels), expected)
