"""The loss against a sum over all paths; what is padded or cannot be written changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.recipes.speech.text.ctc import ctc_loss_sum
from paceline.recipes.speech.text.labels import required_frames
from tests.recipes.speech.alignments import log_prob_of_texts, random_log_probs

CLASSES = 4
BLANK = 3


def batch(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Logits and targets of 6 utterances: repeats, an empty transcript, some with no room to spare."""
    dice = torch.Generator().manual_seed(seed)
    texts = [[0, 1, 2], [1, 1, 1], [2], [], [0, 0], [2, 1, 0, 1, 2]]
    frames = [5, 5, 4, 3, 3, 5]
    targets = torch.full((6, 5), BLANK, dtype=torch.int64)
    for number, text in enumerate(texts):
        targets[number, : len(text)] = torch.tensor(text, dtype=torch.int64)
    logits = torch.randn(6, 5, CLASSES, generator=dice, dtype=torch.float64).to(dtype)
    return logits, targets, frames, [len(text) for text in texts]


def loss_and_gradient(logits: Tensor, targets: Tensor, frames: list[int], labels: list[int]) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = ctc_loss_sum(leaf.log_softmax(-1), targets, frames, labels)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_sum_over_all_paths(seed: int) -> None:
    logits, targets, frames, labels = batch(seed)
    log_probs = logits.log_softmax(-1)
    expected = 0.0
    for number in range(len(frames)):
        texts = log_prob_of_texts(log_probs[number, : frames[number]].numpy(), BLANK)
        expected -= texts[tuple(targets[number, : labels[number]].tolist())]
    assert float(ctc_loss_sum(log_probs, targets, frames, labels)) == pytest.approx(expected, abs=1e-12)
    as_tensors = ctc_loss_sum(log_probs, targets, torch.tensor(frames), torch.tensor(labels))
    assert float(as_tensors) == pytest.approx(expected, abs=1e-12)


def test_gradients_are_those_of_differences() -> None:
    logits, targets, frames, labels = batch(0)
    leaf = logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: ctc_loss_sum(x.log_softmax(-1), targets, frames, labels), (leaf,))


def test_float32_is_close_to_float64() -> None:
    """At the sizes of speech, where torch's own loss is off by 1e-3 in float32: 300 frames, 29 classes, 80 labels."""
    dice = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(4, 300, 29, generator=dice, dtype=torch.float64)
    targets = torch.randint(0, 28, (4, 80), generator=dice)
    frames, labels = [300, 290, 200, 170], [80, 60, 80, 1]
    exact, exact_gradient = loss_and_gradient(logits, targets, frames, labels)
    single, single_gradient = loss_and_gradient(logits.float(), targets, frames, labels)
    assert single.dtype == torch.float32
    assert float(abs(single - exact) / exact) < 1e-7
    assert float((single_gradient - exact_gradient).abs().max()) < 2e-6


def test_half_precision_is_taken_as_it_is_whatever_autocast_says() -> None:
    logits, targets, frames, labels = batch(2, torch.bfloat16)
    log_probs = logits.float().log_softmax(-1).bfloat16()
    expected = ctc_loss_sum(log_probs.float(), targets, frames, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ctc_loss_sum(log_probs, targets, frames, labels)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, expected)


def test_what_is_padded_does_not_matter() -> None:
    """More frames with any content, more targets with any content: the same bits."""
    logits, targets, frames, labels = batch(3)
    loss, gradient = loss_and_gradient(logits, targets, frames, labels)
    for number, length in enumerate(frames):
        logits[number, length:] = 1000.0 * torch.randn(5 - length, CLASSES, dtype=torch.float64)
    longer = torch.cat([logits, torch.full((6, 7, CLASSES), 50.0, dtype=torch.float64)], 1)
    for filler in (BLANK, 0, -1, 10**6):
        wider = torch.full((6, 9), filler)
        for number, length in enumerate(labels):
            wider[number, :length] = targets[number, :length]
        padded_loss, padded_gradient = loss_and_gradient(longer, wider, frames, labels)
        assert torch.equal(padded_loss, loss)
        assert torch.equal(padded_gradient[:, :5], gradient)
        assert not padded_gradient[:, 5:].any()


@pytest.mark.parametrize(
    ("frames", "text"),
    [(0, [1]), (0, []), (1, [0, 1]), (2, [1, 1]), (4, [1, 1, 1]), (3, [0, 0, 1])],
    ids=str,
)
def test_an_utterance_too_short_for_its_transcript_adds_nothing(frames: int, text: list[int]) -> None:
    """Not in the loss, not in a gradient, not for its neighbours; one frame more and it counts."""
    assert frames < max(required_frames(text), 1)
    logits, targets, lengths, labels = batch(4)
    loss, gradient = loss_and_gradient(logits, targets, lengths, labels)
    more_logits = torch.cat([logits[:2], torch.randn(1, 5, CLASSES, dtype=torch.float64), logits[2:]])
    more_targets = torch.cat([targets[:2], torch.full((1, 5), BLANK), targets[2:]])
    more_targets[2, : len(text)] = torch.tensor(text, dtype=torch.int64)
    arguments = more_targets, [*lengths[:2], frames, *lengths[2:]], [*labels[:2], len(text), *labels[2:]]
    more_loss, more_gradient = loss_and_gradient(more_logits, *arguments)
    assert float(more_loss) == pytest.approx(float(loss), abs=1e-12)
    assert not more_gradient[2].any()
    assert torch.equal(more_gradient[[0, 1, 3, 4, 5, 6]], gradient)
    arguments[1][2] = max(required_frames(text), 1)
    assert loss_and_gradient(more_logits, *arguments)[0] > loss


def test_a_batch_of_nothing_but_such_is_zero() -> None:
    logits = torch.randn(2, 3, CLASSES)
    loss, gradient = loss_and_gradient(logits, torch.zeros(2, 4, dtype=torch.int64), [0, 0], [1, 4])
    assert float(loss) == 0.0
    assert not gradient.any()
    loss, gradient = loss_and_gradient(logits[:, :0], torch.zeros(2, 0, dtype=torch.int64), [0, 0], [0, 0])
    assert float(loss) == 0.0
    loss, _ = loss_and_gradient(logits[:0], torch.zeros(0, 4, dtype=torch.int64), [], [])
    assert float(loss) == 0.0
    loss, gradient = loss_and_gradient(logits, torch.zeros(2, 4, dtype=torch.int64), [3, 3], [4, 4])
    assert float(loss) == 0.0
    assert not gradient.any()


def test_a_text_of_probability_zero_adds_nothing() -> None:
    log_probs = torch.from_numpy(random_log_probs(np.random.default_rng(0), 3, CLASSES, 1.0))[None].clone()
    log_probs[0, :, 1] = -torch.inf
    log_probs.requires_grad_()
    loss = ctc_loss_sum(log_probs, torch.tensor([[1]]), [3], [1])
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert log_probs.grad is not None
    assert not log_probs.grad.any()


@pytest.mark.gpu
def test_on_the_gpu_as_on_the_cpu() -> None:
    """Utterances without frames, without labels and without room included."""
    dice = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 200, 29, generator=dice)
    targets = torch.randint(0, 28, (6, 60), generator=dice)
    frames, labels = [200, 0, 30, 150, 0, 1], [60, 3, 60, 0, 0, 1]
    loss, gradient = loss_and_gradient(logits, targets, frames, labels)
    gpu_loss, gpu_gradient = loss_and_gradient(logits.cuda(), targets.cuda(), frames, labels)
    torch.testing.assert_close(gpu_loss.cpu(), loss, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gpu_gradient.cpu(), gradient, rtol=0.0, atol=1e-6)
    assert not gpu_gradient[[1, 2, 4]].any()
    assert torch.equal(loss_and_gradient(logits.cuda(), targets.cuda(), frames, labels)[1], gpu_gradient)
