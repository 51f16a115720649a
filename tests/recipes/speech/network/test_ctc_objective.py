"""Loss of CTC over several layers and views, against its formula."""

from __future__ import annotations

import pytest
import torch

from paceline.recipes.speech.network.ctc_objective import Objective, divergence_sum
from paceline.recipes.speech.text.ctc import ctc_loss_sum


def test_the_objective_is_the_weighted_sum_of_its_parts() -> None:
    torch.manual_seed(0)
    layers, views, batch, frames, classes = 3, 2, 2, 7, 4
    passes = torch.randn(layers, views, batch, frames, classes, dtype=torch.float64).log_softmax(-1)
    targets, lengths, sizes = torch.tensor([[0, 1, 2], [2, 1, 0]]), [7, 5], [3, 2]
    found = Objective(layers, views, 0.3, 0.2).loss_sum(passes.flatten(0, 2), targets, lengths, sizes)

    def ctc(layer: int) -> float:
        each = [ctc_loss_sum(passes[layer, view], targets, lengths, sizes).item() for view in range(views)]
        return sum(each) / views

    divergence = 0.0
    for row, length in enumerate(lengths):
        for frame in range(length):
            p, q = passes[0, 0, row, frame].exp(), passes[0, 1, row, frame].exp()
            divergence += ((p * (p / q).log()).sum() + (q * (q / p).log()).sum()).item() / 2
    assert divergence_sum(passes[0, 0], passes[0, 1], lengths).item() == pytest.approx(divergence)
    expected = 0.7 * ctc(0) + 0.3 * (ctc(1) + ctc(2)) / 2 + 0.2 * divergence
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_no_gradient_flows_into_the_view_that_is_the_target() -> None:
    first, second = (torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    divergence_sum(first.log_softmax(-1), second.log_softmax(-1), [2]).backward()
    towards = (first.softmax(-1) - second.softmax(-1)).detach() / 2  # of a cross entropy with the other as target
    assert first.grad is not None
    torch.testing.assert_close(first.grad[:, :2], towards[:, :2])
    assert not first.grad[:, 2].any()
