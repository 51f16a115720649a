"""Subword units of a run: byte-pair encoding of both languages together, or whole words; kept as `tokenizer.json`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import InvalidSetting, PacelineError
from paceline.core.extras import imports_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
FILE = "tokenizer.json"
"""In the run folder, in the form of the library `tokenizers`."""
MULTIPLE = 8
"""Sizes of vocabularies are multiples of this, which matrix units of GPUs want."""
NUM_BYTES = 256
Tokens = Literal["bpe", "words"]
_AT_ONCE = 10_000
_PARALLEL = "TOKENIZERS_PARALLELISM"


class BadTokenizer(PacelineError):
    """A file of subword units that cannot be used."""

    path: Path
    why: str
    sentence = "{path}: {why}"
    hint = f"name a {FILE} that a run of this recipe has written, or the folder of such a run"


class Vocabulary:
    """Texts to numbers and back."""

    def __init__(self, text: str, origin: Path | None = None) -> None:
        """`text` is the JSON of a tokenizer; `origin` names it in messages."""
        with imports_for("translation"):
            from tokenizers import Tokenizer

        self.json = text
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare exceptions
            raise BadTokenizer(origin or Path(FILE), f"is no tokenizer ({str(error).splitlines()[0]})") from None
        marks = [self._tokenizer.token_to_id(mark) for mark in SPECIAL]
        if marks != list(range(len(SPECIAL))):
            raise BadTokenizer(origin or Path(FILE), f"its marks are not {', '.join(SPECIAL)} in this order")

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @classmethod
    def read(cls, path: Path) -> Vocabulary:
        """Read the units of a file, or of a run."""
        file = path / FILE if path.is_dir() else path
        try:
            return cls(file.read_text(encoding="utf-8"), file)
        except FileNotFoundError:
            raise BadTokenizer(file, "there is no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadTokenizer(file, f"cannot be read ({error})") from None

    @classmethod
    def train(cls, lines: Iterable[str], size: int, *, tokens: Tokens = "bpe", lowercase: bool = False) -> Vocabulary:
        """Learn units from all lines of both languages. The same lines give the same units."""
        with imports_for("translation"):
            import tokenizers
        size -= size % MULTIPLE
        if tokens == "bpe" and size < NUM_BYTES + len(SPECIAL):
            raise InvalidSetting(
                f"`vocabulary` {size} is too small: the 256 bytes and 4 marks alone need 260",
                hint="set `--vocabulary 8000`, for example",
            )
        made = (
            _bpe(tokenizers, lines, size, lowercase) if tokens == "bpe" else _words(tokenizers, lines, size, lowercase)
        )
        missing = -made.get_vocab_size() % MULTIPLE
        made.add_special_tokens([f"<unused{number}>" for number in range(missing)])
        return cls(made.to_str())

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the numbers of each text, without marks."""
        for batch in _in_batches(texts):
            for each in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield each.ids
        # Loaders fork, and the library's threads do not follow: from here on it works without them, and says nothing.
        os.environ.setdefault(_PARALLEL, "false")

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of numbers; marks are left out."""
        kept = [[number for number in row if number >= len(SPECIAL)] for row in rows]
        texts: list[str] = self._tokenizer.decode_batch(kept, skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]

    def tokens(self, numbers: Sequence[int]) -> list[str]:
        """Return the units by name, for people."""
        return [str(self._tokenizer.id_to_token(int(number))) for number in numbers]


def _normalizer(tokenizers: Any, lowercase: bool) -> Any:
    steps = [tokenizers.normalizers.NFC(), *([tokenizers.normalizers.Lowercase()] if lowercase else [])]
    return tokenizers.normalizers.Sequence(steps)


def _bpe(tokenizers: Any, lines: Iterable[str], size: int, lowercase: bool) -> Any:
    """Byte-level, so that no text has unknown units; a word is the same at the beginning of a line as elsewhere."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = _normalizer(tokenizers, lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_in_batches(lines), trainer=trainer)
    return tokenizer


def _words(tokenizers: Any, lines: Iterable[str], size: int, lowercase: bool) -> Any:
    """Whatever stands between spaces; the most frequent ones."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = _normalizer(tokenizers, lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(_in_batches(lines), trainer=trainer)
    return tokenizer


def _in_batches(lines: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    yield batch
