"""Sentences for a language model: transcripts of manifests and lines of text files, written as labels have them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.core.cloud.address import local_path
from paceline.core.cloud.file_copy import bring
from paceline.core.errors import PacelineError, Unreadable
from paceline.core.run_folder import RunRecord
from paceline.recipes.speech.manifest.read import read_manifests
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.recognizer import NotSpeech
from paceline.recipes.speech.text.labels import ENGLISH, Labels, TextMode, normalized, read_labels
from paceline.recipes.speech.text.pieces import UNKNOWN, WORD_START, Pieces, is_byte
from paceline.recipes.speech.text.subwords.tokenizer import stored
from paceline.train.apply import read_run

_TEXT_FILES = (".txt", ".txt.gz", ".text", ".gz")


class NoText(PacelineError):
    """Files without a single word."""

    paths: str
    sentence = "{paths}: there is no text in it"
    hint = "give manifests with transcripts, or text files (.txt, .txt.gz) with a sentence per line"


class Spelling(NamedTuple):
    """Characters that texts are brought to, and by which rules."""

    letters: Labels
    rules: TextMode


def spelling(run: Path | None, labels: str | None, rules: TextMode | None) -> Spelling:
    """Return how a run writes; what is given besides comes first. Without a run: English letters."""
    letters, of_run = ENGLISH, "en"
    if run is not None:
        record: RunRecord = read_run(run)
        if "network" not in record.settings:
            raise NotSpeech(run, str(record.task))
        tokenizer = stored(run)
        symbols = read_network(record.settings["network"]).labels if tokenizer is None else tokenizer.pieces
        pieces = [piece for piece in Pieces(tuple(symbols)).pieces if not is_byte(piece)]
        space = (" ",) if any(piece.startswith(WORD_START) for piece in pieces) else ()
        characters = set("".join(pieces)) - {WORD_START, UNKNOWN}
        letters, of_run = Labels((*space, *sorted(characters))), record.settings.get("text_rules", "en")
    if labels is not None:
        letters = Labels(tuple(read_labels(labels)))
    return Spelling(letters, rules or of_run)  # type: ignore[arg-type]


def sentences(paths: Sequence[str], how: Spelling) -> list[list[str]]:
    """Return the words of all texts; of letters that have no space, each character is a word."""
    texts = [text for path in paths for text in _texts(path)]
    found = list(normalized(texts, how.letters, how.rules))
    if " " not in how.letters.characters:
        return [list("".join(text.split())) for text in found if text.strip()]
    return [text.split() for text in found if text.strip()]


def _texts(path: str) -> Iterator[str]:
    if not path.endswith(_TEXT_FILES):
        manifest, _ = read_manifests(path, min_seconds=0.0)
        yield from (manifest.texts.raw(row).decode() for row in range(len(manifest)))
        return
    where = local_path(path)
    bring(where)
    try:
        with (gzip.open if path.endswith(".gz") else open)(where, "rt", encoding="utf-8") as file:
            yield from (line.strip() for line in file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Unreadable(
            f"{where} cannot be read: {getattr(error, 'strerror', None) or error}",
            hint="give UTF-8 text, plain or compressed with gzip",
        ) from None
