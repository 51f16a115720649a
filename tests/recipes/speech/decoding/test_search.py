"""The search against every text there is, scored one by one in float64; in C and in Python."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.recipes.speech.decoding import native
from paceline.recipes.speech.decoding.arpa import read_arpa
from paceline.recipes.speech.decoding.decoder import BeamDecoder, WrongBeam
from paceline.recipes.speech.decoding.limits import WrongOutputs
from paceline.recipes.speech.decoding.native import NativeSearch, why_not
from paceline.recipes.speech.text.pieces import Pieces
from tests.recipes.speech.alignments import collapse, log_prob_of_texts, random_log_probs
from tests.recipes.speech.decoding import models

CHARACTERS = Pieces((" ", "a", "b"))
SUBWORDS = Pieces(("\u2581a", "\u2581b", "b"))
ALL = {"beam_width": 300, "beam_log_prob": -math.inf, "token_log_prob": -50.0, "prune_history": False}


def decoder(kind: str, labels: Pieces, **choices: Any) -> BeamDecoder:
    """Return a decoder that searches on the CPU in compiled C or, as where no compiler is installed, in Python."""
    if kind == "C":
        made = BeamDecoder(labels, **choices)
        assert isinstance(made.on_cpu, NativeSearch), why_not()
        return made
    native.library.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.COMPILER_VARIABLE, "no-such-compiler")
        made = BeamDecoder(labels, **choices)
    assert made.note is not None
    assert "no C compiler is installed" in made.note
    return made


def ending_in_letters(dice: np.random.Generator, frames: int, labels: Pieces) -> NDArray[np.float64]:
    """Return log-probabilities under which no text ends in a space."""
    found = random_log_probs(dice, frames, len(labels) + 1, 1.5)
    if " " in labels.symbols:
        found[-1, [labels.symbols.index(" "), labels.blank]] = -100.0
    return found.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", ["C", "Python"])
@pytest.mark.parametrize("labels", [CHARACTERS, SUBWORDS], ids=["characters", "subwords"])
@pytest.mark.parametrize("hotwords", [(), ("b", "ab aab")], ids=["plain", "hot"])
@pytest.mark.parametrize("has_model", [True, False], ids=["lm", "no lm"])
def test_a_wide_beam_finds_every_text_with_its_score(
    tmp_path: Path, kind: str, labels: Pieces, hotwords: tuple[str, ...], has_model: bool
) -> None:
    path, grams = models.written(tmp_path), models.grams_of(models.ARPA)
    weights = {"lm_weight": 0.7, "word_bonus": 0.9, "unknown_offset": -3.0, "hotword_weight": 2.0}
    search = decoder(kind, labels, lm=path if has_model else None, hotwords=hotwords, **weights, **ALL)
    hot = {word for phrase in hotwords for word in phrase.split()}
    for seed in range(2):
        log_probs = ending_in_letters(np.random.default_rng(seed), 4, labels)
        acoustic: dict[str, list[float]] = defaultdict(list)
        for ids, value in log_prob_of_texts(log_probs, labels.blank).items():
            acoustic[labels.decode(ids)].append(value)
        found = search(torch.from_numpy(log_probs)[None].float(), [4], 300)[0]
        likely = {text for text, values in acoustic.items() if np.logaddexp.reduce(values) > -60}
        assert {each.text for each in found} >= likely
        assert len({each.text for each in found}) == len(found)
        assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
        for each in found:
            if each.text not in likely:
                continue
            words = each.text.split()
            lm = sum(
                0.7
                * math.log(10)
                * (models.log_prob(grams, ["<s>", *words[:place]], word, 3) - 3.0 * (word not in ("a", "b", "ab")))
                + 0.9
                for place, word in enumerate(words)
            )
            if words:
                lm += 0.7 * math.log(10) * models.log_prob(grams, ["<s>", *words], "</s>", 3)
            expected = np.logaddexp.reduce(acoustic[each.text])
            assert each.acoustic == pytest.approx(expected, abs=1e-6)
            if has_model and words:
                assert each.lm == pytest.approx(lm, abs=1e-5)
            if words or not has_model:
                score = expected + (lm if has_model else 0.0) + 2.0 * sum(word in hot for word in words)
                assert each.score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("labels", [Pieces((" ", *"abcd'")), Pieces(("\u2581", "\u2581a", "b", "ab", "\u2581ba", "c"))])
@pytest.mark.parametrize("width", [1, 4, 16])
def test_both_ways_find_the_same_in_any_batch(tmp_path: Path, labels: Pieces, width: int) -> None:
    model = read_arpa(models.written(tmp_path))
    choices = {"lm": model, "hotwords": ["ba"], "hotword_weight": 1.5, "beam_width": width}
    compiled, plain = decoder("C", labels, **choices), decoder("Python", labels, **choices)
    outputs = models.outputs(np.random.default_rng(width), 12, len(labels) + 1, 2.0)
    lengths = [len(each) for each in outputs]
    padded = torch.full((12, max(lengths), len(labels) + 1), math.nan)
    for number, each in enumerate(outputs):
        padded[number, : len(each)] = torch.from_numpy(each)
    padded[3:] = padded[3:].nan_to_num(0.0)
    together = compiled(padded.nan_to_num(0.0), lengths, width)
    assert any(len(each) > 1 for each in together) or width == 1
    for number, each in enumerate(outputs):
        assert compiled(torch.from_numpy(each)[None], [len(each)], width) == [together[number]]
    for expected, found in zip(together, plain(padded.nan_to_num(0.0), lengths, width), strict=True):
        assert [each.text for each in found] == [each.text for each in expected]
        assert [each.words for each in found] == [each.words for each in expected]
        np.testing.assert_allclose([each.score for each in found], [each.score for each in expected], atol=1e-9)


@pytest.mark.parametrize("kind", ["C", "Python"])
def test_times_are_those_of_the_most_probable_path(kind: str) -> None:
    """Of all paths that write a text, the one whose labels are most probable together."""
    log_probs = random_log_probs(np.random.default_rng(5), 5, 4, 1.5).astype(np.float32).astype(np.float64)
    best: dict[str, float] = defaultdict(lambda: -math.inf)
    for path in itertools.product(range(4), repeat=5):
        text = CHARACTERS.decode(collapse(path, 3))
        best[text] = max(best[text], float(sum(log_probs[frame, label] for frame, label in enumerate(path))))
    search = decoder(kind, CHARACTERS, **ALL)
    found = search.on_cpu(torch.from_numpy(log_probs)[None].float(), [5], 300)[0]
    assert len(found) > 20
    for each in found:
        text = CHARACTERS.decode(collapse(tuple(each.path.tolist()), 3))
        assert float(log_probs[range(5), each.path].sum()) == pytest.approx(best[text], abs=1e-6)


@pytest.mark.parametrize("kind", ["C", "Python"])
def test_nothing_and_silence(kind: str) -> None:
    search = decoder(kind, CHARACTERS)
    silence = torch.full((2, 7, 4), -30.0)
    silence[..., 3] = 0.0
    assert search.texts(silence, [7, 0]) == ["", ""]
    assert search.texts(torch.zeros(0, 5, 4), []) == []
    assert search.texts(torch.zeros(2, 0, 4), [0, 0]) == ["", ""]


@pytest.mark.parametrize("kind", ["C", "Python"])
def test_word_times_and_scores(kind: str) -> None:
    """Frames of a word go from its first label to behind its last; the label of a space belongs to none."""
    path = [3, 1, 1, 3, 2, 0, 0, 3, 2, 2, 3]  # " ab" would be 0 1 2
    log_probs = torch.full((1, len(path), 4), math.log(0.02))
    log_probs[0, range(len(path)), path] = math.log(0.94)
    search = decoder(kind, CHARACTERS, frame_seconds=0.02)
    best = search(log_probs, [len(path)])[0][0]
    assert best.text == "ab b"
    assert [(word.text, word.start, word.end) for word in best.words] == [("ab", 0.02, 0.1), ("b", 0.16, 0.2)]
    assert [word.score for word in best.words] == pytest.approx([math.log(0.94)] * 2, abs=1e-6)
    start = decoder(kind, Pieces(("\u2581", "a", "b", "\u2581c")))
    assert start.texts(torch.cat([log_probs, torch.full((1, len(path), 1), -9.0)], -1)[..., [0, 1, 2, 4, 3]], [11]) == [
        "ab b"
    ]


def test_the_beam_sums_paths_where_greedy_takes_one() -> None:
    """The textbook case: the best path is blank blank (0.36), the best text is one label (0.64)."""
    log_probs = torch.tensor([[0.4, 0.6], [0.4, 0.6]]).log()[None]
    best = BeamDecoder(Pieces(("a",)), beam_width=3)(log_probs, [2])[0][0]
    assert best.text == "a"
    assert best.score == pytest.approx(math.log(0.64))


@pytest.mark.parametrize("kind", ["C", "Python"])
@pytest.mark.parametrize(
    ("shape", "lengths", "why"),
    [
        ((1, 5, 3), [5], "the blank among them: 4"),
        ((5, 4), [5], "the blank among them: 4"),
        ((1, 5, 4), [6], "the length 6"),
        ((1, 5, 4), [-1], "the length -1"),
        ((2, 5, 4), [5], "lengths: 1"),
    ],
)
def test_outputs_of_another_shape_are_refused(kind: str, shape: tuple[int, ...], lengths: list[int], why: str) -> None:
    with pytest.raises(WrongOutputs, match=why):
        decoder(kind, CHARACTERS).texts(torch.full(shape, -2.0), lengths)


@pytest.mark.parametrize("kind", ["C", "Python"])
def test_numbers_that_are_no_log_probabilities_are_refused(kind: str) -> None:
    """Those behind the end of an utterance are not looked at."""
    search = decoder(kind, CHARACTERS)
    log_probs = torch.zeros(1, 3, 4).log_softmax(-1)
    log_probs[0, 2] = 7.0
    assert search.texts(log_probs, [2]) == search.texts(log_probs[:, :2], [2])
    with pytest.raises(WrongOutputs, match="more than 1"):
        search.texts(log_probs, [3])


def test_the_compiled_search_writes_no_more_labels_than_it_has_room_for() -> None:
    """A frame has at most e^5 labels above e^-5; rounded to 16 bits a few more, and without being normalised any."""
    labels = Pieces(tuple(chr(0x4E00 + number) for number in range(5000)))
    search = decoder("C", labels, beam_width=64)
    with pytest.raises(WrongOutputs, match="more than 1"):
        search.texts(torch.zeros(2, 20, 5001), [20, 20])
    few = decoder("C", Pieces(labels.symbols[:151]))
    assert len(few.texts(torch.zeros(1, 3, 152).log_softmax(-1).bfloat16(), [3])) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 2.5},
        {"beam_width": 10**9},
        {"lm_weight": "heavy"},
        {"hotwords": [None]},
        {"hotwords": ["ab" * 5000]},
        {"hotword_weight": float("inf")},
    ],
)
def test_arguments_that_no_search_has(wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongBeam, match=f"`{next(iter(wrong))}` is "):
        BeamDecoder(Pieces((" ", "a", "b")), **wrong)
