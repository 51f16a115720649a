"""Greedy decoding against a loop."""

from __future__ import annotations

import torch

from paceline.recipes.speech.text.decode import greedy
from tests.recipes.speech.alignments import collapse


def test_greedy_collapses_the_best_path_of_the_frames_there_are() -> None:
    dice = torch.Generator().manual_seed(0)
    log_probs = torch.randn(50, 30, 4, generator=dice).log_softmax(-1)
    lengths = torch.randint(0, 31, (50,), generator=dice)
    lengths[:3] = torch.tensor([0, 1, 30])
    best = log_probs.argmax(-1)
    for blank in (3, 0):
        expected = [
            list(collapse(tuple(row[:length].tolist()), blank)) for row, length in zip(best, lengths, strict=True)
        ]
        assert greedy(log_probs, lengths, blank) == expected
        assert greedy(log_probs.bfloat16().float(), lengths.tolist(), blank) is not None
        assert greedy(log_probs, lengths.tolist(), blank) == expected
    assert max(map(len, expected)) > 10


def test_greedy_of_nothing() -> None:
    assert greedy(torch.zeros(0, 5, 3), [], 2) == []
    assert greedy(torch.zeros(2, 0, 3), [0, 0], 2) == [[], []]
