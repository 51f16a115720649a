"""`paceline lm TEXTS OUT`: make an n-gram language model of text, or measure one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.cloud.address import Place, shown
from paceline.core.cloud.file_copy import send
from paceline.core.errors import InvalidSetting
from paceline.core.json_text import json_text
from paceline.core.language import translate
from paceline.core.terminal import emit, tell

with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class LmOptions(Section):
        """Make an n-gram language model of text (modified Kneser-Ney), as an ARPA file for `--lm`; or measure one."""

        texts: str
        """Manifests, packed files, or text files (.txt, .txt.gz) with a sentence per line, with commas between them."""
        out: Place | None = None
        """The ARPA file to write; compressed if it ends in .gz."""
        order: Annotated[int, Field(ge=1, le=6)] = 3
        """Words of the longest n-grams."""
        score: Place | None = None
        """Make nothing, but say how well this model predicts the texts: an ARPA file or a binary of KenLM."""
        run: Place | None = None
        """Write texts as this run of speech recognition does: with its labels and its text rules."""
        labels: str | None = None
        """Characters that texts are brought to, or a text file (.txt) with them; English letters if nothing says
        others."""
        text_rules: Literal["en", "basic", "none"] | None = None
        """How texts are brought to the labels, as in `paceline train asr`; `en` if nothing says otherwise."""
        force: bool = False
        """Replace what is there."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of text."""


OPTIONS, POSITIONAL = LmOptions, ("texts", "out")


def run(argv: Sequence[str]) -> int:
    options = load(LmOptions, argv, prog="paceline lm", positional=POSITIONAL)
    if (options.out is None) == (options.score is None):
        raise InvalidSetting(
            "neither a file to write nor a model to measure is named",
            hint="`paceline lm train.json lm.arpa` makes a model, `paceline lm test.json --score lm.arpa` measures one",
        )
    return _make(options) if options.score is None else _measure(options)


def _make(options: LmOptions) -> int:
    from paceline.recipes.speech.decoding.arpa import write_arpa
    from paceline.recipes.speech.decoding.kneser_ney import FALLBACK, estimate
    from paceline.recipes.speech.decoding.text import NoText, sentences, spelling
    from paceline.recipes.speech.manifest.scan import refuse_overwriting

    assert options.out is not None
    refuse_overwriting([options.out], options.force)
    texts = sentences(options.texts.split(","), spelling(options.run, options.labels, options.text_rules))
    if not texts:
        raise NoText(options.texts)
    made = estimate(texts, options.order)
    write_arpa(options.out, made.words, made.levels)
    send(options.out)
    counts = [len(level.ids) for level in made.levels]
    if options.json:
        facts = {"sentences": made.num_sentences, "words": made.num_tokens, "ngrams": counts}
        more = {"discounts": made.discounts, "fallback_orders": made.fell_back}
        emit(json_text({"model": shown(options.out), **facts, **more}) + "\n")
        return 0
    grams = ", ".join(f"{count:,} {order}-grams" for order, count in enumerate(counts, 1))
    line = translate("{path}: {grams}, of {words:,} words in {sentences:,} sentences")
    tell(f"{line.format(path=shown(options.out), grams=grams, words=made.num_tokens, sentences=made.num_sentences)}\n")
    if made.fell_back:
        orders = ", ".join(f"{order}" for order in made.fell_back)
        note = translate("too little text for discounts of its own at order {orders}: {discounts} are taken")
        tell(f"{note.format(orders=orders, discounts=FALLBACK)}\n")
    return 0


def _measure(options: LmOptions) -> int:
    from paceline.recipes.speech.decoding.decoder import load_language_model
    from paceline.recipes.speech.decoding.ngram import measure
    from paceline.recipes.speech.decoding.text import NoText, sentences, spelling

    assert options.score is not None
    model = load_language_model(options.score)
    texts = sentences(options.texts.split(","), spelling(options.run, options.labels, options.text_rules))
    if not texts:
        raise NoText(options.texts)
    fit = measure(model, texts)
    if options.json:
        emit(json_text({"model": shown(options.score), **fit._asdict()}) + "\n")
        return 0
    line = translate(
        "perplexity {perplexity:.1f} on {words:,} words and {sentences:,} ends of sentences; "
        "without the {unknown:,} unknown words {known:.1f}"
    )
    numbers = {"perplexity": fit.perplexity, "words": fit.words, "sentences": fit.sentences}
    tell(f"{line.format(**numbers, unknown=fit.unknown_words, known=fit.known_perplexity)}\n")
    return 0
