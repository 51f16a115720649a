"""Subwords that a run writes: read from SentencePiece's and NeMo's files, or learned from transcripts; one file.

A run and an export keep the file as it was (`tokenizer.model`, or `vocab.txt` of word pieces), so that any program that
reads such files reads these.
"""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from paceline.core.errors import PacelineError
from paceline.core.extras import imports_for
from paceline.core.language import phrase
from paceline.recipes.speech.text.pieces import WORD_START, from_wordpiece
from paceline.recipes.speech.text.subwords.cutting import (
    BPE,
    UNIGRAM,
    Cutter,
    SentencePieceCutter,
    WordPieceCutter,
    is_punctuation,
)
from paceline.recipes.speech.text.subwords.model_file import (
    MAX_BYTES,
    Damaged,
    Piece,
    PieceKind,
    SentencePieceModel,
    parse_model,
    write_bpe_model,
)

FileName = Literal["tokenizer.model", "vocab.txt"]
MODEL: Final = "tokenizer.model"
WORD_PIECES: Final = "vocab.txt"
"""Names of the file in a run, an export, and a folder of NeMo's."""
_UNKNOWN_NAMES = ("[UNK]", "<unk>")
_PARALLEL = "TOKENIZERS_PARALLELISM"
_MOST_MEMBERS = 10_000
"""Of an archive; those of NeMo have a dozen."""


class BadTokenizer(PacelineError):
    """A file of subwords that cannot be used."""

    path: Path | str
    why: str
    sentence = "{path}: {why}"
    hint = (
        f"give a SentencePiece model ({MODEL}; BPE or unigram), word pieces ({WORD_PIECES}), a folder with one of them "
        "as NeMo makes it, a run or an export, or a .nemo archive"
    )


class VocabularySmall(PacelineError):
    """Fewer subwords than there are characters."""

    asked: int
    least: int
    sentence = "`vocabulary` {asked} is too small: the characters of the transcripts alone need {least}"
    hint = "set `--vocabulary {advised}`, or leave it out to train on characters"

    @property
    def advised(self) -> int:
        return max(128, -(-2 * self.least // 64) * 64)


class NothingToLearn(PacelineError):
    """Subwords of transcripts without a character."""

    sentence = "subwords are learned from the training transcripts, and all of these are empty"
    hint = "look at the key `text` of the training manifest, or give subwords that are there: `--tokenizer PATH`"


class VocabularyLarge(PacelineError):
    """More subwords than the transcripts have."""

    asked: int
    most: int
    sentence = (
        "`vocabulary` {asked} is too large: the training transcripts give {most:#subword}, then all words are one"
    )
    hint = "set `--vocabulary {most}` or fewer; a tenth of it, say, so that most are heard often"


@dataclass(frozen=True)
class Tokenizer:
    """Subwords by number, and how a text is cut into them."""

    content: bytes
    """Of the file, as it was."""
    file: FileName
    pieces: tuple[str, ...]
    """In SentencePiece's convention, `▁` at the beginning of a word: see `Pieces`."""
    characters: frozenset[str]
    """Characters that can be written, the space among them."""
    cutter: Cutter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and (self.file, self.content) == (other.file, other.content)

    def __hash__(self) -> int:
        return hash((self.file, self.content))

    @cached_property
    def shown(self) -> str:
        """Number and first subwords, for people."""
        longest = sorted(self.pieces, key=len, reverse=True)[:3]
        return f"{len(self.pieces):,} subwords ({', '.join(longest)}, ...)"


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the subwords of a file, of a folder (NeMo's, a run, an export), or of a .nemo archive."""
    if path.suffix == ".nemo":
        return _of_archive(path)
    file = path
    if path.is_dir():
        names = [name for name in (MODEL, WORD_PIECES) if (path / name).is_file()]
        if not names:
            raise BadTokenizer(
                path, phrase("there is neither a {model} nor a {words} in it", model=MODEL, words=WORD_PIECES)
            )
        file = path / names[0]
    try:
        if file.stat().st_size > MAX_BYTES:
            raise BadTokenizer(file, phrase("has more than {most:,} bytes", most=MAX_BYTES))
        content = file.read_bytes()
    except FileNotFoundError:
        raise BadTokenizer(file, phrase("there is no such file")) from None
    except OSError as error:
        raise BadTokenizer(file, phrase("cannot be read ({why})", why=error.strerror)) from None
    return parse_tokenizer(content, WORD_PIECES if file.suffix == ".txt" else MODEL, file)


def parse_tokenizer(content: bytes, file: FileName, origin: Path | str) -> Tokenizer:
    """Read subwords from the content of a file that has this name in runs; `origin` names it in messages."""
    return _word_pieces(content, origin) if file == WORD_PIECES else _sentence_pieces(content, origin)


def stored(folder: Path) -> Tokenizer | None:
    """Return the subwords that a run or an export has; None if it writes characters."""
    has_some = any((folder / name).is_file() for name in (MODEL, WORD_PIECES))
    return read_tokenizer(folder) if has_some else None


def _sentence_pieces(content: bytes, origin: Path | str) -> Tokenizer:
    try:
        model = parse_model(content)
        _check_model(model)
        cutter = SentencePieceCutter(model)
    except Damaged as error:
        raise BadTokenizer(origin, phrase("is no SentencePiece model ({why})", why=str(error))) from None
    usual = (PieceKind.NORMAL, PieceKind.USER_DEFINED)
    single = {piece.text for piece in model.pieces if piece.kind in usual and len(piece.text) == 1}
    characters = frozenset({" ", *single} - {WORD_START})
    return Tokenizer(content, MODEL, tuple(piece.text for piece in model.pieces), characters, cutter)


def _check_model(model: SentencePieceModel) -> None:
    if model.model_type not in (BPE, UNIGRAM):
        raise Damaged("its pieces are whole words or characters, not BPE or unigram")
    if model.treat_whitespace_as_suffix or not model.escape_whitespaces:
        raise Damaged("its pieces do not mark where words begin")
    if sum(piece.kind is PieceKind.UNKNOWN for piece in model.pieces) != 1:
        raise Damaged("it must have one piece for what is unknown")
    if model.byte_fallback and sum(piece.kind is PieceKind.BYTE for piece in model.pieces) != 256:
        raise Damaged("it falls back to bytes and does not have all 256")
    twice = [text for text, count in Counter(piece.text for piece in model.pieces).items() if count > 1]
    if twice:
        raise Damaged(f"{twice[0]!r} stands there more than once")


def _word_pieces(content: bytes, origin: Path | str) -> Tokenizer:
    try:
        lines = [line.rstrip("\r") for line in content.decode("utf-8").split("\n")]
    except UnicodeDecodeError:
        raise BadTokenizer(origin, phrase("is not a text file")) from None
    symbols = [line for line in lines if line]
    unknown = next((name for name in _UNKNOWN_NAMES if name in symbols), None)
    if unknown is None or not any(symbol.startswith("##") for symbol in symbols):
        why = phrase("holds no word pieces: those have `##` inside of words, and [UNK]")
        raise BadTokenizer(origin, why)
    if len(set(symbols)) < len(symbols):
        twice = next(symbol for symbol, count in Counter(symbols).items() if count > 1)
        raise BadTokenizer(origin, phrase("{twice!r} stands there more than once", twice=twice))
    pieces = from_wordpiece(symbols)
    known = set(pieces)
    starts = {piece[1:] for piece in pieces if len(piece) == 2 and piece[0] == WORD_START}
    characters = frozenset({" ", *(each for each in starts if each in known or is_punctuation(each))})
    return Tokenizer(content, WORD_PIECES, pieces, characters, WordPieceCutter(pieces, symbols.index(unknown)))


def _of_archive(path: Path) -> Tokenizer:
    """Read the subwords in an archive of NeMo's: the names of its files begin with a key."""
    try:
        with tarfile.open(path, "r:*") as archive:
            members: dict[str, tarfile.TarInfo] = {}
            for number, member in enumerate(archive):
                if number >= _MOST_MEMBERS:
                    raise BadTokenizer(path, phrase("has more files in it than {most:,}", most=_MOST_MEMBERS))
                if member.isreg() and member.name.endswith((MODEL, WORD_PIECES)):
                    members[member.name.removeprefix("./")] = member  # of one name, the last counts
            models = [name for name in members if name.endswith(MODEL)]
            names = models or list(members)
            if not names:
                raise BadTokenizer(path, phrase("is an archive of a model that writes characters: it has no subwords"))
            if len(names) > 1:
                several = phrase("has several files of subwords: {names}; unpack it", names=", ".join(names[:3]))
                raise BadTokenizer(path, several)
            member = members[names[0]]
            origin = f"{path}/{names[0]}"
            if member.size > MAX_BYTES:
                raise BadTokenizer(origin, phrase("has more than {most:,} bytes", most=MAX_BYTES))
            file = archive.extractfile(member)
            assert file is not None
            content = file.read()
    except FileNotFoundError:
        raise BadTokenizer(path, phrase("there is no such file")) from None
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise BadTokenizer(path, phrase("cannot be read ({why})", why=str(error))) from None
    return parse_tokenizer(content, MODEL if models else WORD_PIECES, origin)


# -- learned subwords --------------------------------------------------------------------------------------------------


def learn_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Learn so many subwords from texts, unknown characters and single characters among them; the same texts give the
    same subwords.

    Merges are found by the package `tokenizers`, and stored as a SentencePiece model: earlier ones have higher scores.
    """
    with imports_for("asr"):
        import tokenizers
    model = tokenizers.models.BPE(unk_token="<unk>")
    learner = tokenizers.Tokenizer(model)
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>"], show_progress=False)
    learner.train_from_iterator(_filled(texts), trainer=trainer)
    # Loaders fork, and the library's threads do not follow: from here on it works without them, and says nothing.
    os.environ.setdefault(_PARALLEL, "false")
    by_number = [text for text, _ in sorted(learner.get_vocab().items(), key=lambda pair: pair[1])][1:]
    characters = sorted((text for text in by_number if len(text) == 1), key=lambda text: (text != WORD_START, text))
    merged = [text for text in by_number if len(text) > 1]
    least, most = len(characters) + 1, len(by_number) + 1
    if not characters:
        raise NothingToLearn
    if size < least:
        raise VocabularySmall(size, least)
    if most < size:
        raise VocabularyLarge(size, most)
    pieces = [Piece("<unk>", 0.0, PieceKind.UNKNOWN)]
    pieces += [Piece(text, -float(rank)) for rank, text in enumerate([*merged, *characters])]
    return parse_tokenizer(write_bpe_model(pieces), MODEL, MODEL)


def _filled(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text.strip())
