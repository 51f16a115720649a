"""Subwords that a run writes: read from SentencePiece's and NeMo's files, or learned from transcripts.

A run and an export keep the file as it was (`tokenizer.model`, or `vocab.txt` of word pieces), so that any program that
reads such files reads these. Texts are cut by the packages `sentencepiece` and `tokenizers`.
"""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from paceline.core.errors import InvalidData, InvalidSetting, PacelineError
from paceline.core.extras import PackagesMissing
from paceline.core.units import counted
from paceline.recipes.speech.text.pieces import WORD_START, from_wordpiece
from paceline.recipes.speech.text.subwords.model_file import write_bpe_model

FileName = Literal["tokenizer.model", "vocab.txt"]
MODEL: Final = "tokenizer.model"
WORD_PIECES: Final = "vocab.txt"
"""Names of the file in a run, an export, and a folder of NeMo's."""
MAX_BYTES = 2**26
_UNKNOWN_NAMES = ("[UNK]", "<unk>")
_LONGEST_WORD = 100
"""Characters of a word that BERT cuts; a longer one is unknown."""
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


@dataclass(frozen=True)
class Tokenizer:
    """Subwords by number, and how a text is cut into them."""

    content: bytes = field(repr=False)
    """Of the file, as it was."""
    file: FileName
    pieces: tuple[str, ...] = field(compare=False)
    """In SentencePiece's convention, `▁` at the beginning of a word: see `Pieces`."""
    characters: frozenset[str] = field(compare=False)
    """Characters that can be written, the space among them."""
    encode: Callable[[str], list[int]] = field(compare=False, repr=False)
    """Return the numbers of a text's subwords."""

    @cached_property
    def shown(self) -> str:
        """Number and longest subwords, for people."""
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
            raise BadTokenizer(path, f"the folder contains neither a {MODEL} nor a {WORD_PIECES}")
        file = path / names[0]
    try:
        if file.stat().st_size > MAX_BYTES:
            raise BadTokenizer(file, f"has more than {MAX_BYTES:,} bytes")
        content = file.read_bytes()
    except FileNotFoundError:
        raise BadTokenizer(file, "there is no such file") from None
    except OSError as error:
        raise BadTokenizer(file, f"cannot be read ({error.strerror})") from None
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
        import sentencepiece
    except ModuleNotFoundError:
        raise PackagesMissing("asr", "sentencepiece", "asr") from None
    if not content:
        raise BadTokenizer(origin, "is not a SentencePiece model (the file is empty)")
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise BadTokenizer(origin, f"is not a SentencePiece model ({error})") from None
    if not model.normalize("a b").endswith(f"a{WORD_START}b"):
        raise BadTokenizer(origin, "its pieces do not mark where words begin")
    pieces = tuple(model.id_to_piece(number) for number in range(len(model)))
    single = {piece for number, piece in enumerate(pieces) if len(piece) == 1 and _is_written(model, number)}
    return Tokenizer(content, MODEL, pieces, frozenset({" ", *single} - {WORD_START}), model.encode)


def _is_written(model: Any, number: int) -> bool:
    return not (
        model.is_unknown(number) or model.is_control(number) or model.is_unused(number) or model.is_byte(number)
    )


def _word_pieces(content: bytes, origin: Path | str) -> Tokenizer:
    try:
        lines = [line.rstrip("\r") for line in content.decode("utf-8").split("\n")]
    except UnicodeDecodeError:
        raise BadTokenizer(origin, "is not a text file") from None
    symbols = [line for line in lines if line]
    unknown = next((name for name in _UNKNOWN_NAMES if name in symbols), None)
    if unknown is None or not any(symbol.startswith("##") for symbol in symbols):
        raise BadTokenizer(origin, "holds no word pieces: those have `##` inside of words, and [UNK]")
    twice = [symbol for symbol, count in Counter(symbols).items() if count > 1]
    if twice:
        raise BadTokenizer(origin, f"contains {twice[0]!r} more than once")
    tokenizers = _tokenizers()
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    cutter = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD)
    )
    cutter.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    cutter.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    pieces = from_wordpiece(symbols)
    inside = set(pieces)
    starts = {piece[1:] for piece in pieces if len(piece) == 2 and piece[0] == WORD_START}
    # a character that only begins words can be written where it is a word of its own: punctuation
    alone = {each for each in starts - inside if len(cutter.pre_tokenizer.pre_tokenize_str(f"a{each}")) > 1}
    return Tokenizer(content, WORD_PIECES, pieces, frozenset({" ", *(starts & inside), *alone}), _WordPieces(cutter))


@dataclass(frozen=True)
class _WordPieces:
    """Cuts texts as BERT does (cased): words and punctuation apart, each into the longest pieces from the left."""

    cutter: Any

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self.cutter.encode(text, add_special_tokens=False).ids
        return ids


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise PackagesMissing("asr", "tokenizers", "asr") from None
    return tokenizers


def _of_archive(path: Path) -> Tokenizer:
    """Read the subwords of a NeMo archive, whose file names begin with a key."""
    try:
        with tarfile.open(path, "r:*") as archive:
            members: dict[str, tarfile.TarInfo] = {}
            for number, member in enumerate(archive):
                if number >= _MOST_MEMBERS:
                    raise BadTokenizer(path, f"has more files in it than {_MOST_MEMBERS:,}")
                if member.isreg() and member.name.endswith((MODEL, WORD_PIECES)):
                    members[member.name.removeprefix("./")] = member  # of one name, the last counts
            models = [name for name in members if name.endswith(MODEL)]
            names = models or list(members)
            if not names:
                raise BadTokenizer(path, "is an archive of a model that writes characters: it has no subwords")
            if len(names) > 1:
                raise BadTokenizer(path, f"has several files of subwords: {', '.join(names[:3])}; unpack it")
            member = members[names[0]]
            origin = f"{path}/{names[0]}"
            if member.size > MAX_BYTES:
                raise BadTokenizer(origin, f"has more than {MAX_BYTES:,} bytes")
            file = archive.extractfile(member)
            assert file is not None
            content = file.read()
    except FileNotFoundError:
        raise BadTokenizer(path, "there is no such file") from None
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise BadTokenizer(path, f"cannot be read ({error})") from None
    return parse_tokenizer(content, MODEL if models else WORD_PIECES, origin)


def learn_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Learn BPE of `size` pieces from texts, the unknown one and single characters included; the same texts give the
    same pieces.

    Merges are found by the package `tokenizers`, and stored as a SentencePiece model: earlier ones have higher scores.
    """
    tokenizers = _tokenizers()
    learner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>"], show_progress=False)
    learner.train_from_iterator((text for text in texts if text.strip()), trainer=trainer)
    # Loaders fork, and threads of the library do not survive that: without this it warns in every worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    by_number = [text for text, _ in sorted(learner.get_vocab().items(), key=lambda pair: pair[1])][1:]
    characters = sorted((text for text in by_number if len(text) == 1), key=lambda text: (text != WORD_START, text))
    merged = [text for text in by_number if len(text) > 1]
    least, most = len(characters) + 1, len(by_number) + 1
    if not characters:
        raise InvalidData(
            "subwords are learned from the training transcripts, and all of these are empty",
            hint="look at the key `text` of the training manifest, or give existing subwords: `--tokenizer PATH`",
        )
    if size < least:
        advised = max(128, -(-2 * least // 64) * 64)
        raise InvalidSetting(
            f"`vocabulary` {size} is too small: the characters of the transcripts alone need {least}",
            hint=f"set `--vocabulary {advised}`, or leave it out to train on characters",
        )
    if most < size:
        raise InvalidSetting(
            f"`vocabulary` {size} is too large: the training transcripts give {counted(most, 'subword')}, "
            "then every word is one",
            hint=f"set `--vocabulary {most}` or fewer; a tenth of it, for example, so that most occur often",
        )
    return parse_tokenizer(write_bpe_model("<unk>", [*merged, *characters]), MODEL, MODEL)
