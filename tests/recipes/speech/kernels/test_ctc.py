"""CTC's kernels in Triton's interpreter and on a GPU, against torch's loss in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from paceline.recipes.speech.kernels.ctc import ctc_losses
from paceline.recipes.speech.text.ctc import ctc_loss_sum

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels run there")


def by_torch(log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """In float64 on the host, with 0 for what cannot be written; an utterance without frames is given one and
    left out."""
    leaf = log_probs.detach().double().cpu().requires_grad_()
    losses = F.ctc_loss(
        leaf.transpose(0, 1),
        targets.cpu(),
        frames.cpu().clamp_min(1),
        labels.cpu(),
        blank=leaf.shape[2] - 1,
        reduction="none",
        zero_infinity=True,
    )
    losses = losses * (frames.cpu() > 0)
    losses.sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad.masked_fill(leaf == -torch.inf, 0.0)  # where torch has nan


def by_kernel(log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = log_probs.detach().clone().requires_grad_()
    losses = ctc_losses(leaf, targets, frames, labels)
    losses.sum().backward()
    assert leaf.grad is not None
    return losses.detach().cpu(), leaf.grad.cpu()


def compare(log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, atol: float = 1e-6) -> None:
    losses, gradient = by_kernel(log_probs, targets, frames, labels)
    expected, expected_gradient = by_torch(log_probs, targets, frames, labels)
    torch.testing.assert_close(losses, expected, rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=0.0, atol=atol)
    assert not losses[expected == 0.0].any()


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Few classes, so that labels repeat; lengths down to nothing; probabilities from equal to absurd."""
    size, num_frames, num_labels = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 4))
    num_classes, scale = draw(st.integers(2, 4)), draw(st.sampled_from([0.0, 1.0, 30.0, 3000.0]))
    dice = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    log_probs = (scale * torch.randn(size, num_frames, num_classes, generator=dice)).log_softmax(-1)
    targets = torch.randint(0, num_classes - 1, (size, num_labels), generator=dice)
    frames = torch.randint(0, num_frames + 1, (size,), generator=dice)
    labels = torch.randint(0, num_labels + 1, (size,), generator=dice)
    return log_probs, targets, frames, labels


@interpreted
@given(batches())
@settings(max_examples=8)
def test_as_torch_in_float64(batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    compare(*batch)


@interpreted
def test_without_a_gradient_too() -> None:
    batch = (
        torch.randn(2, 5, 4).log_softmax(-1),
        torch.tensor([[0, 1], [1, 2]]),
        torch.tensor([5, 4]),
        torch.tensor([2, 1]),
    )
    losses, _ = by_kernel(*batch)
    assert torch.equal(ctc_losses(*batch), losses)


@interpreted
def test_frames_classes_and_labels_of_several_tiles() -> None:
    """More than 16 frames, 32 classes and 64 labels; a log-probability of -inf; rows that do not lie side by side."""
    dice = torch.Generator().manual_seed(0)
    wide = 4 * torch.randn(2, 71, 50, generator=dice)
    wide[:, :, 7] = -torch.inf
    log_probs = wide[:, :, :40].log_softmax(-1).transpose(0, 1).contiguous().transpose(0, 1)
    targets = torch.randint(8, 39, (2, 70), generator=dice)
    compare(log_probs, targets, torch.tensor([71, 20]), torch.tensor([70, 5]))


@interpreted
def test_a_path_that_is_improbable_at_first_is_not_lost() -> None:
    """The only way to write the text has e**-2000 of the probability of silence when it begins."""
    log_probs = torch.full((1, 20, 3), -200.0)
    log_probs[0, :12, 2] = log_probs[0, 12:, 0] = 0.0
    log_probs[0, :10, 1] = -199.0
    targets = torch.tensor([[0, 1] * 5])
    compare(log_probs, targets, torch.tensor([20]), torch.tensor([10]))


@interpreted
@pytest.mark.parametrize("mistake", ["nan", "label", "frames", "labels"])
def test_what_has_no_meaning_is_nan(mistake: str) -> None:
    """In the loss and the gradient of that utterance, which stops a run; nothing is read beyond the ends."""
    log_probs = torch.randn(2, 5, 4).log_softmax(-1)
    targets, frames, labels = torch.tensor([[0, 1], [1, 2]]), torch.tensor([5, 5]), torch.tensor([2, 2])
    good = by_kernel(log_probs, targets, frames, labels)
    if mistake == "nan":
        log_probs[1, 3, 1] = torch.nan
    elif mistake == "label":
        targets[1, 0] = 3  # the blank
    else:
        (frames if mistake == "frames" else labels)[1] = 9
    losses, gradient = by_kernel(log_probs, targets, frames, labels)
    assert losses[1].isnan()
    assert losses[0] == good[0][0]
    assert gradient[1].isnan().all()
    assert torch.equal(gradient[0], good[1][0])


@interpreted
def test_nothing_at_all() -> None:
    losses = ctc_losses(torch.zeros(0, 4, 3), torch.zeros(0, 2, dtype=torch.int64), *torch.zeros(2, 0).long())
    assert losses.shape == (0,)
    compare(torch.zeros(2, 3, 2), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([3, 0]), torch.tensor([0, 0]))


@interpreted
def test_the_operator_is_sound() -> None:
    """Its shapes without data, and its gradient where torch traces it, as torch's own checks see it."""
    log_probs = torch.randn(2, 4, 3).log_softmax(-1).requires_grad_()
    lengths = torch.tensor([4, 3]), torch.tensor([1, 1])
    torch.library.opcheck(torch.ops.paceline.ctc.default, (log_probs, torch.tensor([[0], [1]]), *lengths, True))


# -- on a GPU --------------------------------------------------------------------------------------------------------


def speech(batch: int, num_frames: int, num_labels: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Odd lengths; an utterance without labels, one without frames, one that cannot be written."""
    dice = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(batch, num_frames, 29, generator=dice)).log_softmax(-1)
    targets = torch.randint(0, 28, (batch, num_labels), generator=dice)
    frames = torch.randint(num_frames // 2, num_frames + 1, (batch,), generator=dice)
    labels = torch.randint(1, num_labels + 1, (batch,), generator=dice)
    frames[0], labels[0] = num_frames, num_labels
    labels[1], frames[2], frames[3], labels[3] = 0, 0, 11, 60
    return log_probs.cuda(), targets.cuda(), frames.cuda(), labels.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(8, 835, 250), (5, 301, 77), (4, 2000, 600)], ids=str)
def test_speech_on_the_gpu(sizes: tuple[int, int, int]) -> None:
    batch = speech(*sizes)
    compare(*batch, atol=1e-5)
    first, second = by_kernel(*batch), by_kernel(*batch)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.gpu
def test_half_precision_on_the_gpu() -> None:
    log_probs, *rest = speech(4, 300, 80)
    short = log_probs.bfloat16()
    compare(short, *rest, atol=5e-3)  # the gradient is given in bfloat16


@pytest.mark.gpu
def test_a_captured_loss_reads_new_lengths() -> None:
    """One graph, replayed with other data: nothing of the first is in it, and nothing waits."""
    first, second = speech(4, 200, 60, 0), speech(4, 200, 60, 1)
    static = [each.clone() for each in first]
    leaf = static[0].requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        loss = ctc_loss_sum(leaf, *static[1:])
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient = run()
    for batch in (first, second):
        with torch.no_grad():
            for place, value in zip(static, batch, strict=True):
                place.copy_(value)
        graph.replay()
        losses, expected = by_kernel(*batch)
        torch.testing.assert_close(loss.cpu(), losses.sum().float())
        assert torch.equal(gradient.cpu(), expected)
