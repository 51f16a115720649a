"""The transducer's loss, against all of its paths one by one, plain loops, finite differences, and other programs."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.recipes.speech.text.transducer import arc_log_probs, lattice_losses, transducer_loss_sum
from tests.recipes.speech.network.conformer.nemo_source import text_of, where

TARGETS = torch.tensor([[0, 1, 2], [3, 0, 99], [1, -5, 7], [0, 0, 0]])
FRAMES, LABELS = [4, 3, 0, 1], [3, 2, 1, 0]


def scores(dtype: torch.dtype = torch.float64, batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 4, 4, 5, dtype=torch.float64, generator=generator).to(dtype)


def losses(values: Tensor, fastemit: float = 0.0) -> Tensor:
    return lattice_losses(*arc_log_probs(values, TARGETS), FRAMES, LABELS, fastemit)


def by_paths(values: Tensor, targets: list[int]) -> float:
    """Of one utterance, (frames, labels + 1, classes): every order of its labels and blanks."""
    log_probs, found = values.log_softmax(-1), []
    steps = len(log_probs) - 1 + len(targets)
    for places in itertools.combinations(range(steps), len(targets)):
        frame = label = 0
        total = log_probs[-1, len(targets), -1].item()
        for step in range(steps):
            if step in places:
                total += log_probs[frame, label, targets[label]].item()
                label += 1
            else:
                total += log_probs[frame, label, -1].item()
                frame += 1
        found.append(total)
    return -torch.tensor(found, dtype=torch.float64).logsumexp(0).item()


def by_loops(values: Tensor, targets: list[int]) -> Tensor:
    """The same by the recursion of the paper, with torch's own gradients."""
    log_probs, rows = values.log_softmax(-1), {(0, 0): values.new_zeros(())}
    for frame in range(len(log_probs)):
        for label in range(len(targets) + 1):
            ways = []
            if frame:
                ways.append(rows[frame - 1, label] + log_probs[frame - 1, label, -1])
            if label:
                ways.append(rows[frame, label - 1] + log_probs[frame, label - 1, targets[label - 1]])
            if ways:
                rows[frame, label] = torch.stack(ways).logsumexp(0)
    last = len(log_probs) - 1
    return -(rows[last, len(targets)] + log_probs[last, len(targets), -1])


def test_it_is_the_sum_over_all_paths() -> None:
    values = scores()
    found = losses(values)
    for row, (frames, labels) in enumerate(zip(FRAMES, LABELS, strict=True)):
        expected = by_paths(values[row, :frames, : labels + 1], TARGETS[row, :labels].tolist()) if frames else 0.0
        assert found[row].item() == pytest.approx(expected, abs=1e-12)


def test_gradients_are_those_of_plain_loops_and_of_finite_differences() -> None:
    values = scores().requires_grad_()
    assert torch.autograd.gradcheck(losses, (values,))
    losses(values).sum().backward()
    found, values.grad = values.grad, None
    rows = zip(range(4), FRAMES, LABELS, strict=True)
    plain = [by_loops(values[row, :f, : n + 1], TARGETS[row, :n].tolist()) for row, f, n in rows if f]
    torch.stack(plain).sum().backward()
    assert found is not None
    torch.testing.assert_close(found, values.grad, rtol=0, atol=1e-12)


def test_padding_adds_exactly_nothing() -> None:
    """Not even if it is no number; and an utterance is the same in any batch."""
    clean = scores(torch.float32).requires_grad_()
    losses(clean).sum().backward()
    values = scores(torch.float32)
    for row, (frames, labels) in enumerate(zip(FRAMES, LABELS, strict=True)):
        values[row, frames:] = 1e30
        values[row, :, labels + 1 :] = 1e30
    values.requires_grad_()
    found = losses(values)
    found.sum().backward()
    assert clean.grad is not None
    assert values.grad is not None
    assert torch.equal(found, losses(clean))
    for row, (frames, labels) in enumerate(zip(FRAMES, LABELS, strict=True)):
        assert not values.grad[row, frames:].any()
        assert not values.grad[row, :, labels + 1 :].any()
        alone = arc_log_probs(clean[row : row + 1, :frames, : labels + 1], TARGETS[row : row + 1, :labels])
        if frames:
            assert lattice_losses(*alone, [frames], [labels]).item() == found[row].item()


@pytest.mark.parametrize("most", [10**9, 80, 1])
def test_chunks_change_nothing(most: int) -> None:
    """Dropout neither: it is drawn once for both passes of a chunk."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    frames = torch.randn(4, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    states = torch.randn(4, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)

    def joint(frames: Tensor, states: Tensor) -> Tensor:
        return torch.tanh(frames.unsqueeze(2) + states.unsqueeze(1)) @ weight

    total = transducer_loss_sum(joint, frames, states, TARGETS, FRAMES, LABELS, num_classes=5, most_logits=most)
    found = torch.autograd.grad(total, (weight, frames, states))
    whole = losses(joint(frames, states)).sum()
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    for ours, expected in zip(found, torch.autograd.grad(whole, (weight, frames, states)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_dropout_is_the_same_when_scores_are_computed_again() -> None:
    frames = torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True)

    def joint(frames: Tensor, states: Tensor) -> Tensor:
        return torch.nn.functional.dropout(frames.unsqueeze(2) + states.unsqueeze(1), 0.5)[..., :5] * 3

    states, targets = torch.zeros(2, 3, 8, dtype=torch.float64), torch.tensor([[0, 1], [2, 3]])
    results = []
    for most in (45, 1):  # 2 chunks of 1, however many logits there may be
        torch.manual_seed(0)
        total = transducer_loss_sum(joint, frames, states, targets, [3, 3], [2, 2], num_classes=5, most_logits=most)
        results.append((total.item(), torch.autograd.grad(total, frames)[0]))
    torch.manual_seed(0)
    each = [joint(frames[row : row + 1], states[row : row + 1]) for row in range(2)]
    arcs = [lattice_losses(*arc_log_probs(each[row], targets[row : row + 1]), [3], [2]) for row in range(2)]
    expected = torch.autograd.grad(torch.cat(arcs).sum(), frames)[0]
    for total, gradient in results:
        assert total == pytest.approx(torch.cat(arcs).sum().item())
        torch.testing.assert_close(gradient, expected)


def test_sums_are_as_exact_for_long_utterances_in_half_precision() -> None:
    torch.manual_seed(0)
    values = torch.randn(1, 300, 41, 8).bfloat16()
    targets = torch.randint(0, 7, (1, 40))
    results = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        leaf = values.clone().to(dtype).requires_grad_()
        loss = lattice_losses(*arc_log_probs(leaf, targets), [300], [40])
        loss.backward()
        assert leaf.grad is not None
        results.append((loss.item(), leaf.grad.double()))
    (_, half), (single, gradient), (double, exact) = results
    assert single == pytest.approx(double, rel=1e-6)
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(half, exact, rtol=0.01, atol=1e-5)  # rounded once, at the end


def test_fastemit_adds_to_the_gradients_of_labels_alone() -> None:
    blank, label = (each.detach().requires_grad_() for each in arc_log_probs(scores(), TARGETS))
    plain = torch.autograd.grad(lattice_losses(blank, label, FRAMES, LABELS).sum(), (blank, label))
    found = torch.autograd.grad(lattice_losses(blank, label, FRAMES, LABELS, 0.01).sum(), (blank, label))
    assert torch.equal(found[0], plain[0])
    torch.testing.assert_close(found[1], 1.01 * plain[1])


@pytest.mark.skipif(where() is None, reason="NeMo's source is not here: set PACELINE_NEMO to a checkout of it")
@pytest.mark.parametrize("fastemit", [0.0, 0.01])
def test_nemo_has_the_same_losses_and_gradients(fastemit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its reference in numpy."""
    folder = where()
    assert folder is not None
    name = "nemo.collections.asr.parts.numba.rnnt_loss.rnnt_numpy"
    try:
        source = text_of(folder, name.replace(".", "/") + ".py")
    except subprocess.CalledProcessError:
        pytest.skip("this NeMo has no such reference")
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
    kept = [0, 1, 3]
    values = scores(torch.float32)[kept]
    theirs, ours = (values.clone().requires_grad_() for _ in range(2))
    kind: Any = module.RNNTLoss(blank=4, fastemit_lambda=fastemit)
    sizes = [torch.tensor([numbers[row] for row in kept]) for numbers in (FRAMES, LABELS)]
    # its lattice takes the largest lengths of a batch for its shape, and labels that are classes
    kind(theirs, TARGETS.clamp(0, 3)[kept], *sizes).sum().backward()
    found = lattice_losses(*arc_log_probs(ours, TARGETS[kept]), sizes[0].tolist(), sizes[1].tolist(), fastemit)
    found.sum().backward()
    assert theirs.grad is not None
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5)


def test_torchaudio_has_the_same_losses_and_gradients() -> None:
    try:
        functional = importlib.import_module("torchaudio.functional")
    except (ImportError, OSError):  # wheels for GPUs do not load beside a torch for CPUs
        pytest.skip("torchaudio is not installed, or not for this torch")
    kept = [0, 1, 3]
    theirs, ours = (scores(torch.float32)[kept].requires_grad_() for _ in range(2))
    sizes = [torch.tensor([numbers[row] for row in kept], dtype=torch.int32) for numbers in (FRAMES, LABELS)]
    targets = TARGETS[kept].clamp(0, 3).int()
    expected = functional.rnnt_loss(theirs, targets, *sizes, blank=4, reduction="none", clamp=-1)
    expected.sum().backward()
    found = lattice_losses(*arc_log_probs(ours, TARGETS[kept]), sizes[0].tolist(), sizes[1].tolist())
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert theirs.grad is not None
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5)
