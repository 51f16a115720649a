"""The decoder that settings and a model ask for, and what it tells of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.errors import Conflict
from paceline.recipes.speech.decoding.decoder import BeamDecoder, Hypothesis, TextDecoder
from paceline.recipes.speech.head import Head
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.settings import UseSettings
from paceline.recipes.speech.text.pieces import Pieces
from paceline.train.predictions import DetailedText


def make_decoder(settings: UseSettings, labels: Pieces, model: AcousticModel, head: Head) -> TextDecoder:
    """Return the decoder of a run; raise for language models and hot words that do not fit its labels."""
    if settings.decoder == "beam" or settings.lm or settings.hotwords:
        head.check_beam()
    if settings.decoder == "greedy":
        for name, value in (("lm", settings.lm), ("hotwords", ",".join(settings.hotwords))):
            if value:
                raise Conflict(
                    f"`{name}` is {value}, and the greedy decoder uses no language model and no hot words",
                    # a value in the record of a run counts until it is taken back
                    hint=f"add `--decoder beam`; for greedy: `--{name} none`",
                )
        return head.greedy_decoder(model, labels, settings.max_symbols)
    return BeamDecoder(
        labels,
        beam_width=settings.beam_width,
        lm=settings.lm,
        lm_weight=settings.lm_weight,
        word_bonus=settings.word_bonus,
        hotwords=settings.hotwords,
        hotword_weight=settings.hotword_weight,
        frame_seconds=model.frame_seconds,
    )


def detailed(best: Sequence[Hypothesis]) -> DetailedText:
    """Return the text of the best hypothesis, with scores and the times of words; an empty one where there is none."""
    if not best:
        return DetailedText("", {"score": None, "words": []})
    found = best[0]
    words: list[dict[str, Any]] = [
        {"word": word.text, "start": word.start, "end": word.end, "score": round(word.score, 6)} for word in found.words
    ]
    scores = {"score": found.score, "acoustic_score": found.acoustic, "lm_score": found.lm}
    return DetailedText(found.text, {**scores, "words": words})
