"""Greedy decoding against a loop, the beam against every text there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.recipes.asr.text.decode import beam, beam_batch, greedy
from tests.recipes.asr.alignments import collapse, log_prob_of_texts, random_log_probs

ALL = 10**6
"""A beam wider than the number of texts."""


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


@pytest.mark.parametrize("seed", range(12))
def test_the_beam_is_exact_where_it_is_wide(seed: int) -> None:
    """Every text, in the order of its probability, which is the sum over all its paths."""
    dice = np.random.default_rng(seed)
    frames, classes = [(6, 3), (5, 4), (4, 5), (7, 2), (1, 4), (5, 3)][seed % 6]
    blank = int(dice.integers(classes))
    log_probs = random_log_probs(dice, frames, classes, sharpness=[1.0, 4.0][seed // 6])
    expected = log_prob_of_texts(log_probs, blank)
    found = beam(log_probs, blank, ALL, prune=None)
    assert [tuple(hypothesis.ids) for hypothesis in found] == sorted(expected, key=lambda text: -expected[text])
    for hypothesis in found:
        assert hypothesis.log_prob == pytest.approx(expected[tuple(hypothesis.ids)], abs=1e-9)


def test_impossible_labels_are_never_written() -> None:
    dice = np.random.default_rng(0)
    log_probs = random_log_probs(dice, 5, 4, 1.0)
    log_probs[:, 1] = -np.inf
    expected = log_prob_of_texts(log_probs, 3)
    found = beam(log_probs, 3, ALL, prune=None)
    assert {tuple(hypothesis.ids) for hypothesis in found} == set(expected)
    assert beam(np.full((3, 4), -np.inf), 3, 5) == []


@pytest.mark.parametrize("width", [1, 2, 5, 20])
def test_a_narrow_beam_promises_no_more_than_there_is(width: int) -> None:
    """At most `width` texts, each once, best first, none more probable than it is; wider is never worse."""
    for seed in range(10):
        log_probs = random_log_probs(np.random.default_rng(seed), 6, 4, 2.0)
        exact = log_prob_of_texts(log_probs, 3)
        found = beam(log_probs, 3, width, prune=None)
        scores = [hypothesis.log_prob for hypothesis in found]
        assert 1 <= len(found) <= width
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(hypothesis.ids) for hypothesis in found}) == len(found)
        for hypothesis in found:
            assert hypothesis.log_prob <= exact[tuple(hypothesis.ids)] + 1e-12
    if width >= 20:
        assert found[0].ids == list(max(exact, key=lambda text: exact[text]))


def test_a_sure_model_is_read_alike_by_all() -> None:
    """Where one path holds nearly all probability, greedy, a beam of one and a wide pruned one agree."""
    dice = torch.Generator().manual_seed(3)
    log_probs = (
        (12 * torch.nn.functional.one_hot(torch.randint(0, 6, (4, 60), generator=dice), 6)).float().log_softmax(-1)
    )
    lengths = [60, 59, 1, 0]
    best = greedy(log_probs, lengths, 5)
    assert beam_batch(log_probs, lengths, 5, 1) == best
    assert beam_batch(log_probs, torch.tensor(lengths), 5, 50) == best
    assert best[3] == []
    assert len(best[0]) > 20


def test_the_beam_sums_paths_where_greedy_takes_one() -> None:
    """The textbook case: the best path is blank blank (0.36), the best text is one label (0.64)."""
    log_probs = np.log(np.array([[0.4, 0.6], [0.4, 0.6]]))
    assert greedy(torch.from_numpy(log_probs)[None], [2], 1) == [[]]
    assert beam(log_probs, 1, 2)[0].ids == [0]
    assert beam(log_probs, 1, 2)[0].log_prob == pytest.approx(np.log(0.64))


def test_pruned_labels_lose_little() -> None:
    """At 10 nats below the best, what is left out changes the best text's probability by less than 1 %."""
    for seed in range(5):
        log_probs = random_log_probs(np.random.default_rng(seed), 100, 29, 4.0)
        whole, pruned = beam(log_probs, 28, 30, prune=None)[0], beam(log_probs, 28, 30)[0]
        assert pruned.ids == whole.ids
        assert pruned.log_prob == pytest.approx(whole.log_prob, abs=0.01)


def test_a_beam_has_width() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        beam(np.zeros((1, 2)), 1, 0)
