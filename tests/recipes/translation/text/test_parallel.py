from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from paceline.core.errors import InvalidData, InvalidSetting
from paceline.recipes.translation.text.parallel import (
    BadText,
    NoInput,
    NoText,
    ParallelText,
    TextFiles,
    read_lines,
    read_parallel,
)

LINES = [("A dog.", "Ein Hund."), ("Two  cats", "Zwei Katzen"), ("çà", "日本")]


def as_pairs(text: ParallelText) -> list[tuple[str, str]]:
    return [(text.source[row], text.target[row]) for row in range(len(text))]


def two(folder: Path, first: bytes, second: bytes) -> TextFiles:
    (folder / "a.en").write_bytes(first)
    (folder / "a.de").write_bytes(second)
    return TextFiles("train", (folder / "a.en",), (folder / "a.de",))


def test_every_form_gives_the_same_pairs(tmp_path: Path) -> None:
    sides = ["".join(f"{line}\n" for line in side).encode() for side in zip(*LINES, strict=True)]
    files = two(tmp_path, b"\xef\xbb\xbf" + sides[0].replace(b"\n", b"\r\n"), sides[1].rstrip(b"\n"))
    assert as_pairs(read_parallel(files)) == LINES
    packed = tmp_path / "a.en.gz", tmp_path / "a.de.gz"
    for path, side in zip(packed, sides, strict=True):
        path.write_bytes(gzip.compress(side))
    assert as_pairs(read_parallel(TextFiles("train", packed[:1], packed[1:]))) == LINES
    (tmp_path / "a.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in LINES), encoding="utf-8")
    forms = [{"source": a, "target": b} for a, b in LINES], [{"translation": {"en": a, "de": b}} for a, b in LINES]
    for number, form in enumerate(forms):
        text = "".join(json.dumps(line) + "\n" for line in form)
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.tsv", "0.jsonl.gz", "1.jsonl.gz"):
        files = TextFiles("train", pairs=(tmp_path / name,), languages=("en", "de"))
        assert as_pairs(read_parallel(files)) == LINES
        backwards = TextFiles("train", pairs=(tmp_path / name,), languages=("en", "de"), is_reversed=True)
        assert as_pairs(read_parallel(backwards)) == [(b, a) for a, b in LINES]


def test_sources_of_pairs_are_what_is_translated(tmp_path: Path) -> None:
    sources = [source for source, _ in LINES]
    (tmp_path / "a.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in LINES) + "\nalone\n", encoding="utf-8")
    assert read_lines([tmp_path / "a.tsv"]) == [*sources, "", "alone"]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"en": a}) + "\n" for a in sources), encoding="utf-8")
    assert read_lines([tmp_path / "b.jsonl"], languages=("en", "de")) == sources
    (tmp_path / "c.tsv").write_text("".join(f"{b}\t{a}\n" for a, b in LINES), encoding="utf-8")
    assert read_lines([tmp_path / "c.tsv"], is_reversed=True) == sources
    (tmp_path / "d.tsv").write_text("one\ttwo\tthree\n", encoding="utf-8")
    with pytest.raises(BadText, match=r"d.tsv:1: 3 columns instead of a sentence"):
        read_lines([tmp_path / "d.tsv"])


def test_standard_input_is_read_as_a_file_is(tmp_path: Path) -> None:
    raw = b"\xef\xbb\xbfone\rtwo\r\n\nthree"
    (tmp_path / "lines").write_bytes(raw)
    assert read_lines([Path("-")], raw) == read_lines([tmp_path / "lines"]) == ["one\rtwo", "", "three"]
    with pytest.raises(NoInput, match="A dog runs.: there is no such file") as caught:
        read_lines([Path("A dog runs.")])
    assert "paceline infer RUN -" in caught.value.hint


def test_lines_that_do_not_pair_up(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"a.en has 3 lines, .*a.de has 2: they do not pair up"):
        read_parallel(two(tmp_path, b"a\nb\nc\n", b"a\nb\n"))
    with pytest.raises(InvalidSetting, match="`train_source` names 1 file, `train_target` 0"):
        read_parallel(TextFiles("train", (tmp_path / "a.en",)))


def test_all_bad_lines_are_named(tmp_path: Path) -> None:
    files = two(tmp_path, b"one\n\nthree\nfour\n", b"eins\nzwei\nd\xe4i\n \t\n")
    with pytest.raises(BadText) as caught:
        read_parallel(files)
    message = str(caught.value)
    assert message.startswith("3 bad lines")
    assert "a.en:2: the line is empty" in message
    assert "a.de:3: it is not UTF-8 (byte 2 is 0xe4)" in message
    assert "a.de:4: the line is empty" in message
    assert "--bad-data skip" in caught.value.hint
    text = read_parallel(files, skip_bad=True)
    assert as_pairs(text) == [("one", "eins")]
    assert text.num_bad == 3


@pytest.mark.parametrize(
    ("name", "line", "what"),
    [
        ("a.tsv", "one two", "1 column instead of a sentence, a tab and its translation"),
        ("a.tsv", "one\ttwo\tthree", "3 columns instead of"),
        ("a.tsv", "one\t ", "its target is empty"),
        ("a.jsonl", "{", "no JSON"),
        ("a.jsonl", "[1]", "no JSON object"),
        ("a.jsonl", '{"source": "x"}', '"target" or "de" is missing'),
        ("a.jsonl", '{"translation": {"fr": "x", "nl": "y"}}', '"source" or "en" is missing among "fr", "nl"'),
        ("a.jsonl", '{"source": 1, "target": "y"}', '"source" or "en" is no text'),
    ],
)
def test_bad_pairs(tmp_path: Path, name: str, line: str, what: str) -> None:
    (tmp_path / name).write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(BadText) as caught:
        read_parallel(TextFiles("train", pairs=(tmp_path / name,), languages=("en", "de")), skip_bad=True)
    assert f"{name}:1: {what}" in str(caught.value)
    assert "nothing is left" in caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NoText, match="there is no such file"):
        read_parallel(TextFiles("train", pairs=(tmp_path / "none.tsv",)))
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" * 1000)[:-12])
    with pytest.raises(NoText, match="is no whole gzip file"):
        read_parallel(TextFiles("train", pairs=(tmp_path / "cut.tsv.gz",)))
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(NoText, match="there is no line in it"):
        read_parallel(TextFiles("train", pairs=(tmp_path / "empty.tsv",)))
