"""Greedy reading of a transducer: a batch against one utterance and one frame at a time; times and scores of words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.recipes.speech.decoding.transducer import Reading, TransducerReader, read
from paceline.recipes.speech.network.transducer.decoder import Shares, TransducerDecoder
from paceline.recipes.speech.network.transducer.settings import TransducerSettings
from paceline.recipes.speech.text.pieces import Pieces

CHARACTERS = Pieces((" ", "a", "b", "c"))
LENGTHS = [9, 4, 0, 7]


def made(seed: int = 0) -> tuple[TransducerDecoder, Tensor]:
    """A network that writes now and then, and frames."""
    torch.manual_seed(seed)
    network = TransducerDecoder(TransducerSettings(pred_hidden=6, joint_hidden=12), 5, 5, Shares()).eval()
    with torch.no_grad():
        network.joint.out.weight.mul_(4)
        network.joint.out.bias[-1] += 1.0
    return network, torch.randn(4, 9, 12) * 2


def one_by_one(network: TransducerDecoder, frames: Tensor, most: int) -> list[tuple[int, int, float]]:
    """Labels of one utterance with their frames and log-probabilities, as the paper reads them."""
    found = []
    seen, state = network.begin(1)
    for number, frame in enumerate(frames):
        for _ in range(most):
            log_probs = network.joint(frame + seen[0]).log_softmax(-1)
            label = int(log_probs.argmax())
            if label == network.num_classes - 1:
                break
            found.append((label, number, log_probs[label].item()))
            seen, state = network.go_on(torch.tensor([label]), state)
    return found


@pytest.mark.parametrize("most", [10, 1])
@torch.no_grad()
def test_a_batch_is_read_as_each_utterance_alone(most: int) -> None:
    network, frames = made()
    reading = Reading.begin(network, 4)
    read(network, reading, frames, LENGTHS, max_symbols=most)
    assert sum(map(len, reading.ids)) > 4
    for row, length in enumerate(LENGTHS):
        expected = one_by_one(network, frames[row, :length], most)
        assert [(label, frame) for label, frame, _ in expected] == list(
            zip(reading.ids[row], reading.frames[row], strict=True)
        )
        assert reading.scores[row] == pytest.approx([score for *_, score in expected], abs=1e-5)
        assert all(reading.frames[row].count(frame) <= most for frame in reading.frames[row])
        assert reading.totals[row] <= sum(reading.scores[row])


@torch.no_grad()
def test_reading_goes_on_where_it_was() -> None:
    network, frames = made(1)
    whole, parts = Reading.begin(network, 1), Reading.begin(network, 1)
    read(network, whole, frames[:1], [9])
    for first, last in ((0, 4), (4, 9)):
        read(network, parts, frames[:1, first:last], [last - first], first=first)
    assert (parts.ids, parts.frames) == (whole.ids, whole.frames)
    assert parts.totals == pytest.approx(whole.totals)


class Written(TransducerReader):
    """Labels that a network might have written."""

    def of(self, ids: str, frames: list[int]) -> list[tuple[str, float, float]]:
        labels = [self.labels.pieces.index(letter.replace(" ", "\u2581")) for letter in ids]
        found = self._hypothesis(labels, frames, [-0.5] * len(ids), -9.0)
        assert found.text == self.labels.decode(labels)
        assert all(word.score == -0.5 for word in found.words)
        return [(word.text, word.start, word.end) for word in found.words]


def test_words_have_the_times_of_their_labels() -> None:
    reader = Written(made()[0], CHARACTERS, frame_seconds=0.08)
    assert reader.of("ab c", [1, 3, 5, 6]) == [("ab", 0.08, 0.32), ("c", 0.48, 0.56)]
    assert reader.of(" a", [2, 2]) == [("a", 0.16, 0.24)]
    assert reader.of("  b ", [0, 1, 4, 5]) == [("b", 0.32, 0.4)]
    assert reader.of("", []) == []


def test_texts_and_hypotheses_say_the_same() -> None:
    network, frames = made()
    reader = TransducerReader(network, CHARACTERS)
    texts = reader.texts(frames, LENGTHS)
    assert texts == [best[0].text for best in reader(frames, LENGTHS)]
    assert any(texts)
    assert texts[2] == ""
