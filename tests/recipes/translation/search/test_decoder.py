from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.network.transformer import Transformer
from paceline.recipes.translation.search.decoder import beam_search, greedy, length_penalty, most_tokens
from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD

VOCABULARY = 7
"""Four marks (of which the unknown word may be written) and three words."""
LONGEST = 3
WRITABLE = [token for token in range(VOCABULARY) if token not in (PAD, BEGIN, END)]


def network(seed: int) -> Transformer:
    torch.manual_seed(seed)
    shape = Shape(width=8, ffn_width=8, heads=2, encoder_layers=1, decoder_layers=2, dropout=0.0)
    model = Transformer(shape, VOCABULARY).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model


def exhaustive(model: Transformer, source: Tensor, longest: int, alpha: float) -> tuple[list[int], float]:
    """Return the best of all sentences, each scored by one forward over the whole of it."""
    best: tuple[list[int], float] = ([], -float("inf"))
    for length in range(longest + 1):
        for words in product(WRITABLE, repeat=length):
            log_probs = model(source, torch.tensor([[BEGIN, *words]])).log_softmax(2)[0]
            total = sum(float(log_probs[place, token]) for place, token in enumerate([*words, END]))
            score = total / float(length_penalty(float(length + 1), alpha))
            if score > best[1]:
                best = list(words), score
    return best


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@torch.inference_mode()
def test_beam_search_equals_exhaustive_search(alpha: float) -> None:
    """With as many hypotheses as there are beginnings, for sentences of other lengths in one batch."""
    for seed in range(4):
        model = network(seed)
        source = torch.tensor([[5, 6, END], [4, END, PAD]])
        longest = torch.tensor([LONGEST, 2])
        found = beam_search(model, source, longest, len(WRITABLE) ** LONGEST, alpha)
        for row, (tokens, score) in enumerate(found):
            own = source[row : row + 1, : int((source[row] != PAD).sum())]
            words, expected = exhaustive(model, own, int(longest[row]), alpha)
            assert tokens == words
            assert score == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_wider_beams_do_not_depend_on_their_neighbours() -> None:
    model = network(9)
    source = torch.tensor([[5, 6, 4, END], [4, END, PAD, PAD], [6, 6, END, PAD]])
    together = beam_search(model, source, most_tokens(source, 1.0), 3)
    for row in range(3):
        alone = beam_search(model, source[row : row + 1], most_tokens(source[row : row + 1], 1.0), 3)
        assert alone[0][0] == together[row][0]
        assert alone[0][1] == pytest.approx(together[row][1], abs=1e-5)


@torch.inference_mode()
def test_greedy_writes_the_likeliest_next_word() -> None:
    for seed in range(5):
        model = network(seed)
        source = torch.tensor([[5, 6, END], [4, END, PAD], [6, 4, END]])
        longest = torch.tensor([4, 2, 0])
        for row, line in enumerate(greedy(model, source, longest)):
            own = source[row : row + 1, : int((source[row] != PAD).sum())]
            expected: list[int] = []
            while len(expected) < int(longest[row]):
                scores = model(own, torch.tensor([[BEGIN, *expected]]))[0, -1]
                scores[[PAD, BEGIN]] = -float("inf")
                if int(scores.argmax()) == END:
                    break
                expected.append(int(scores.argmax()))
            assert line == expected


@dataclass
class Sure:
    """Writes what it is told, and would rather go on than end."""

    def begin(self, source: Tensor) -> Sure:
        return self

    def select(self, rows: Tensor) -> None: ...

    def reorder(self, rows: Tensor) -> None: ...

    def step(self, tokens: Tensor, state: Sure) -> Tensor:
        return torch.tensor([0.0, 0.0, -9.0, 0.0, 5.0]).expand(len(tokens), -1)


def test_a_sentence_without_an_end_is_cut() -> None:
    source, longest = torch.tensor([[4, END]]), torch.tensor([3])
    assert greedy(Sure(), source, longest) == [[4, 4, 4]]
    (tokens, _), *_ = beam_search(Sure(), source, longest, 2, alpha=5.0)
    assert tokens == [4, 4, 4]
