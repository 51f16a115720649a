"""Subwords of SentencePiece and BERT have the numbers that those programs give, and learned ones are such a model."""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from paceline.core.errors import InvalidData, InvalidSetting
from paceline.core.extras import PackagesMissing
from paceline.recipes.speech.text.labels import encode_all
from paceline.recipes.speech.text.subwords import tokenizer
from paceline.recipes.speech.text.subwords.labels import Subwords
from paceline.recipes.speech.text.subwords.tokenizer import (
    MODEL,
    WORD_PIECES,
    BadTokenizer,
    learn_bpe,
    parse_tokenizer,
    read_tokenizer,
    stored,
)

ROOT = Path(__file__).parents[5]
PAGES = [(ROOT / name).read_text() for name in ("README.md", "docs/speech.md", "docs/zh/speech.md")]
REAL = [line.strip() for page in PAGES for line in page.splitlines() if line.strip()]
"""Text that people wrote: English, Chinese, code and tables."""
SPOKEN = [
    "".join(each for each in line.lower() if (each.isalpha() and each.isascii()) or each in " '") for line in REAL
]
ODD = [
    *("", " ", "  a  b ", "ooooooo hahahaha aaaa", "\ufb01ne \u2167 \u3300 \u00bd", "e\u0301te\u0301", "\tx\ny\u3000z"),
    *(
        "\u6f22\u5b57 to \u304b\u306a",
        "emoji \U0001f600 mix",
        "\uff21\uff42\uff43",
        "<unk> <s> \u2581b _",
        "zzzz qqqq xxx",
    ),
]


def sentencepiece_model(lines: list[str], **options: Any) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **options,
    )
    return written.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe"},
        {"model_type": "unigram"},
        {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf", "byte_fallback": True},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "unigram", "user_defined_symbols": ["ing", "<de>"], "add_dummy_prefix": False},
        {"model_type": "bpe", "user_defined_symbols": ["ing", "<de>"], "remove_extra_whitespaces": False},
        {"model_type": "bpe", "split_by_whitespace": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_labels_and_texts_are_those_of_the_sentencepiece_model(options: dict[str, Any]) -> None:
    content = sentencepiece_model(REAL[:150], vocab_size=700, **options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    ours = Subwords.of(parse_tokenizer(content, MODEL, "m"))
    assert list(ours.symbols) == [theirs.id_to_piece(number) for number in range(len(theirs))]
    assert ours.blank == len(theirs)
    for text in [*ODD, *REAL]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == " ".join(theirs.decode(ids).split()), text


def test_learned_subwords_are_those_of_a_sentencepiece_model(tmp_path: Path) -> None:
    learned = learn_bpe(SPOKEN, 160)
    assert learned == learn_bpe(iter(SPOKEN), 160)
    assert len(learned.pieces) == 160
    assert learned.pieces[0] == "<unk>"
    assert learned.characters == {" ", *"".join(SPOKEN)}
    (tmp_path / MODEL).write_bytes(learned.content)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / MODEL))
    labels = Subwords.of(read_tokenizer(tmp_path))
    for text in SPOKEN:
        assert labels.encode(text) == theirs.encode(text)
        assert labels.decode(labels.encode(text)) == " ".join(text.split()) == theirs.decode(theirs.encode(text))
    assert labels.encode("caf\u00e9") == theirs.encode("caf\u00e9")
    assert theirs.normalize("\ufb01") == "\u2581\ufb01"
    assert stored(tmp_path) == learned
    assert stored(tmp_path / "none") is None


def test_transcripts_are_brought_to_the_characters_of_the_subwords() -> None:
    labels = Subwords.of(learn_bpe(SPOKEN, 120))
    texts, report = encode_all(["Turn  the LIGHTS off, 2 times!", "na\u00efve \u6f22"], labels, "en")
    assert labels.decode(texts[0]) == "turn the lights off two times"
    assert labels.decode(texts[1]) == "naive"
    assert (report.num_texts, report.dropped) == (2, {"\u6f22": 1})
    assert texts.ids.dtype == labels.dtype


def test_a_vocabulary_has_its_limits() -> None:
    with pytest.raises(
        InvalidSetting, match="`vocabulary` 5 is too small: the characters of the transcripts alone need 6"
    ) as small:
        learn_bpe(["abc ab", "d"], 5)
    assert "--vocabulary 128" in small.value.hint
    with pytest.raises(
        InvalidSetting, match="`vocabulary` 500 is too large: the training transcripts give 10 subwords"
    ):
        learn_bpe(["abc ab", "d"], 500)
    assert len(learn_bpe(["abc ab", "d"], 10).pieces) == 10
    with pytest.raises(InvalidData, match="all of these are empty"):
        learn_bpe(["", " "], 64)


def test_word_pieces_are_cut_as_bert_cuts_them(tmp_path: Path) -> None:
    from tokenizers.implementations import BertWordPieceTokenizer

    theirs = BertWordPieceTokenizer(lowercase=False, strip_accents=False)
    theirs.train_from_iterator(REAL[:150], vocab_size=700, show_progress=False)
    theirs.save_model(str(tmp_path))
    labels = Subwords.of(read_tokenizer(tmp_path))
    assert len(labels) == theirs.get_vocab_size()
    for text in [*ODD, *REAL, "x" * 200]:
        assert labels.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
    assert labels.decode(labels.encode("labels of networks")) == "labels of networks"


def test_nemo_archives_have_their_subwords_in_them(tmp_path: Path) -> None:
    learned = learn_bpe(SPOKEN, 100)
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.nemo", "w") as archive:
            for member in ("model_config.yaml", f"./0a1b_{MODEL}") if name == "a" else ("model_config.yaml",):
                entry = tarfile.TarInfo(member)
                entry.size = len(learned.content)
                archive.addfile(entry, io.BytesIO(learned.content))
    assert read_tokenizer(tmp_path / "a.nemo") == learned
    with pytest.raises(BadTokenizer, match="writes characters"):
        read_tokenizer(tmp_path / "b.nemo")


def test_archives_of_strangers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = learn_bpe(SPOKEN, 100).content
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name in (f"a_en_{MODEL}", f"b_es_{MODEL}"):
            entry = tarfile.TarInfo(name)
            entry.size = len(learned)
            archive.addfile(entry, io.BytesIO(learned))
    path = tmp_path / "m.nemo"
    path.write_bytes(plain.getvalue())
    with pytest.raises(BadTokenizer, match=f"several files of subwords: a_en_{MODEL}, b_es_{MODEL}"):
        read_tokenizer(path)
    for packed in (gzip.compress(plain.getvalue()), lzma.compress(plain.getvalue())):
        for at in range(100, len(packed), len(packed) // 8):
            path.write_bytes(packed[:at] + b"\xff" * 40 + packed[at + 40 :])
            with pytest.raises(BadTokenizer):
                read_tokenizer(path)
    path.write_bytes(plain.getvalue())
    monkeypatch.setattr(tokenizer, "_MOST_MEMBERS", 1)
    with pytest.raises(BadTokenizer, match="has more files in it than 1"):
        read_tokenizer(path)


def test_tables_of_characters_that_point_nowhere_are_refused() -> None:
    table_bytes = 2_000
    content = bytearray(sentencepiece_model(REAL[:50], vocab_size=300, model_type="bpe"))
    content[-table_bytes:] = b"x" * table_bytes
    with pytest.raises(BadTokenizer, match="is not a SentencePiece model"):
        parse_tokenizer(bytes(content), MODEL, "m")


def test_subwords_are_sent_to_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\na\nb\n##a\n##b\n")
    for labels in (Subwords.of(learn_bpe(SPOKEN, 120)), Subwords.of(read_tokenizer(tmp_path))):
        there = pickle.loads(pickle.dumps(labels))
        assert there == labels
        assert [there.encode(text) for text in SPOKEN] == [labels.encode(text) for text in SPOKEN]


@pytest.mark.parametrize("package", ["sentencepiece", "tokenizers"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = learn_bpe(SPOKEN, 120).content
    monkeypatch.setitem(sys.modules, package, None)
    content, file = (learned, MODEL) if package == "sentencepiece" else (b"[UNK]\n##a\n", WORD_PIECES)
    with pytest.raises(PackagesMissing, match=f"needs the package {package}") as caught:
        parse_tokenizer(content, file, "m")
    assert caught.value.hint == "pip install 'paceline[asr]'"


def test_files_without_subwords_are_refused(tmp_path: Path) -> None:
    learned = learn_bpe(SPOKEN, 100).content
    suffix = sentencepiece_model(REAL[:50], vocab_size=300, model_type="bpe", treat_whitespace_as_suffix=True)
    bad = {
        "none.model": (None, "there is no such file"),
        "cut.model": (learned[:-1], "is not a SentencePiece model"),
        "text.model": (b"hello", "is not a SentencePiece model"),
        "empty.model": (b"", "the file is empty"),
        "twice.model": (learned + learned, "is already defined"),
        "suffix.model": (suffix, "do not mark where words begin"),
        "vocab.txt": (b"a\nb\n", "no word pieces"),
        "bytes.txt": (b"\xff\xfe", "not a text file"),
        "more.txt": (b"[UNK]\n##a\n##a\n", "more than once"),
    }
    for name, (content, says) in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(BadTokenizer, match=says) as caught:
            read_tokenizer(tmp_path / name)
        assert name in str(caught.value)
        assert "SentencePiece model" in caught.value.hint
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadTokenizer, match=r"neither a tokenizer\.model nor a vocab\.txt"):
        read_tokenizer(tmp_path / "folder")
