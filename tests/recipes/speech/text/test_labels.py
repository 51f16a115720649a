"""Texts brought down to labels, and packed: against rules written out by hand and plain loops."""

from __future__ import annotations

import json
import pickle
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidData
from paceline.recipes.speech.text.english import cardinal, ordinal
from paceline.recipes.speech.text.labels import (
    ENGLISH,
    BadLabels,
    Labels,
    LabelsLackLetters,
    Normalized,
    Normalizer,
    TextMode,
    TextReport,
    covering,
    encode_all,
    is_heard,
    read_labels,
    required_frames,
)


def normalize(text: str, labels: Labels, mode: TextMode) -> Normalized:
    return Normalizer(labels, mode)(text)


UPPER = Labels((" ", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
CHINESE = Labels(("你", "好", "世", "界"))
MANY = Labels(tuple(chr(0x4E00 + number) for number in range(3000)))


def test_the_labels_of_quartznet() -> None:
    assert len(ENGLISH) == 28
    assert ENGLISH.blank == 28
    assert ENGLISH.encode(" az'") == [0, 1, 26, 27]
    assert ENGLISH.decode([3, 1, 20]) == "cat"


@pytest.mark.parametrize(
    ("symbols", "says"),
    [((), "there is none"), (("a", "th"), "'th' is not one character"), (("a", "b", "a"), "'a' stands there more")],
)
def test_labels_that_cannot_work_are_refused(symbols: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadLabels, match=says):
        Labels(symbols)


def test_encoding_names_what_is_outside() -> None:
    with pytest.raises(InvalidData, match="outside the labels: é U\\+0009\n"):
        ENGLISH.encode("caf\u00e9\tcaf\u00e9")


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Hello,  World!", "hello world"),
        ("It\u2019s \u201cfine\u201d\u2014really", "it's fine really"),
        ("\u2018don\u2019t go\u2019 he said", "don't go he said"),
        ("o\u2019clock \u2019tis dogs\u2019", "o'clock 'tis dogs'"),
        ("M\u00fcller na\u00efve \u00c9cole e\u0301", "muller naive ecole e"),
        ("\uff21\uff22\uff23 \ufb01sh", "abc fish"),
        ("well-known \u2013 half\u2010open", "well known half open"),
        ("tabs\tand\nlines\u00a0and so\u00adft", "tabs and lines and soft"),
        ("3.14 & 5% + 2", "three point one four and five percent plus two"),
        ("the 1st, 2nd, 3rd, 12th and 21st", "the first second third twelfth and twenty first"),
        (
            "1,234,567 of 12,34",
            "one million two hundred thirty four thousand five hundred sixty seven of twelve thirty four",
        ),
        ("agent 007 has mp3s", "agent zero zero seven has mp three s"),
        ("-5 degrees, pages 3-5, .5", "minus five degrees pages three five point five"),
        (
            "Mr. Smith, Mrs. Jones, Dr. Who of St. Ives etc.",
            "mister smith missus jones doctor who of saint ives et cetera",
        ),
        ("The end. At last.", "the end at last"),
    ],
)
def test_english(written: str, spoken: str) -> None:
    result = normalize(written, ENGLISH, "en")
    assert result.text == spoken
    assert result.changed
    assert not result.dropped


def test_numbers_in_words() -> None:
    """Counted up through what each is made of: every number below a thousand is its parts, each group by its scale."""
    assert [cardinal(str(number)) for number in (0, 10, 13, 40, 90, 100, 110, 999)] == [
        *("zero", "ten", "thirteen", "forty", "ninety", "one hundred", "one hundred ten"),
        "nine hundred ninety nine",
    ]
    for number in range(1, 1000):
        thousand = cardinal(str(number * 1000 + 7))
        assert thousand == f"{cardinal(str(number))} thousand seven"
        assert cardinal(str(number * 10**12)) == f"{cardinal(str(number))} trillion"
    assert len({cardinal(str(number)) for number in range(10000)}) == 10000
    assert cardinal("1" * 16) == " ".join(["one"] * 16)
    assert [ordinal(str(number)) for number in (5, 8, 9, 20, 100, 101, 1000)] == [
        *("fifth", "eighth", "ninth", "twentieth", "one hundredth", "one hundred first"),
        "one thousandth",
    ]


def test_what_no_label_stands_for_is_dropped_and_counted() -> None:
    result = normalize("Stra\u00dfe \u00df \u00f8re $5 \ud800\U0001f600", ENGLISH, "en")
    assert result.text == "strae re five"
    assert result.dropped == {"\u00df": 2, "\u00f8": 1, "$": 1, "\ud800": 1, "\U0001f600": 1}
    basic = normalize("room 101", ENGLISH, "basic")
    assert (basic.text, basic.dropped) == ("room", {"1": 2, "0": 1})
    none = normalize("It's  5", ENGLISH, "none")
    assert (none.text, none.dropped) == ("t's  ", {"I": 1, "5": 1})


def test_the_labels_decide() -> None:
    """Case follows the labels; what is a label stays: digits, accents, signs, combining marks, typographic quotes."""
    assert normalize("Don't stop, \u00e9t\u00e9 5", UPPER, "en").text == "DONT STOP ETE FIVE"
    german = Labels((" ", *"abcdefghijklmnopqrstuvwxyz\u00e4\u00f6\u00fc\u00df"))
    assert normalize("STRA\u00dfE \u00dcber a\u0308 \u00e9", german, "basic").text == "stra\u00dfe \u00fcber \u00e4 e"
    digits = Labels((*" abcdefghijklmnopqrstuvwxyz.%0123456789",))
    assert normalize("Mr. A has 5.5%", digits, "en").text == "mr. a has 5.5%"
    apart = Labels((*" e\u0301",))
    assert normalize("\u00c9 e\u0301!", apart, "basic").text == "e\u0301 e\u0301"
    thai = Labels(("\u0e33", "\u0e19"))  # NFKC would take the first to pieces
    assert normalize("\u0e19\u0e33!", thai, "basic").text == "\u0e19\u0e33"
    chinese = normalize("你好, 世界!\n", CHINESE, "basic")
    assert (chinese.text, chinese.changed, chinese.dropped) == ("你好世界", True, {})


@given(st.text(max_size=40), st.sampled_from(["en", "basic", "none"]), st.sampled_from([ENGLISH, UPPER, CHINESE]))
def test_any_text_ends_in_labels_and_stays(text: str, mode: TextMode, labels: Labels) -> None:
    result = normalize(text, labels, mode)
    assert labels.characters.issuperset(result.text)
    assert result.changed == (result.text != text)
    again = normalize(result.text, labels, mode)
    assert (again.text, again.dropped, again.changed) == (result.text, {}, False)
    if mode == "none":
        assert len(result.text) + sum(result.dropped.values()) == len(text)
    for character in result.dropped:
        assert character not in labels.characters
        assert unicodedata.category(character)[0] not in "PZ" or mode == "none"


@given(
    st.lists(st.text(st.sampled_from(" abA5.\u00e9\u00df你\ud800\n"), max_size=8)),
    st.sampled_from(["en", "basic", "none"]),
    st.sampled_from([ENGLISH, UPPER, CHINESE]),
)
def test_all_at_once_as_one_by_one(texts: list[str], mode: TextMode, labels: Labels) -> None:
    encoded, report = encode_all(iter(texts), labels, mode)
    one_by_one = [normalize(text, labels, mode) for text in texts]
    assert [encoded[number].tolist() for number in range(len(encoded))] == [
        labels.encode(result.text) for result in one_by_one
    ]
    assert encoded.lengths.tolist() == [len(result.text) for result in one_by_one]
    assert required_frames(encoded).tolist() == [required_frames(labels.encode(result.text)) for result in one_by_one]
    assert report.num_texts == len(texts)
    assert report.num_changed == sum(result.changed for result in one_by_one)
    assert report.num_empty == sum(not result.text for result in one_by_one)
    for character in report.dropped:
        assert report.dropped[character] == sum(result.dropped.get(character, 0) for result in one_by_one)


def test_more_texts_than_a_chunk_holds() -> None:
    dice = random.Random(0)
    texts = ["".join(dice.choices("abc é", k=dice.randrange(5))) for _ in range(40_000)]
    encoded, report = encode_all(texts, ENGLISH, "basic")
    normalizer = Normalizer(ENGLISH, "basic")
    assert report.num_texts == 40_000
    for number in (0, 16_383, 16_384, 16_385, 39_999, -1):
        assert ENGLISH.decode(encoded[number]) == normalizer(texts[number]).text
    with pytest.raises(IndexError):
        encoded[40_000]


def test_packed_texts_travel_as_two_arrays() -> None:
    encoded, _ = encode_all(["seven"] * 10_000, ENGLISH, "none")
    assert encoded.ids.dtype == np.uint8
    data = pickle.dumps(encoded)
    assert len(data) < 5 * 10_000 + 8 * 10_001 + 1000
    loaded = pickle.loads(data)
    np.testing.assert_array_equal(loaded.ids, encoded.ids)
    np.testing.assert_array_equal(loaded.offsets, encoded.offsets)
    many, _ = encode_all([MANY.symbols[2999]], MANY, "basic")
    assert many.ids.dtype == np.int16
    assert many[0].tolist() == [2999]


@pytest.mark.parametrize(("ids", "frames"), [([], 0), ([4], 1), ([4, 4], 3), ([4, 5, 4], 3), ([1, 1, 1, 2, 2], 8)])
def test_frames_that_ctc_needs(ids: list[int], frames: int) -> None:
    assert required_frames(ids) == frames


def test_the_report_says_all() -> None:
    report = TextReport(28_539, 1_204, 2)
    report.dropped.update({"\u00df": 1, "\u00e9": 3000, "\x07": 1})
    assert str(report) == (
        "normalised 1,204 of 28,539 texts; dropped characters outside the labels: é 3,000, U+0007 1, ß 1; 2 empty"
    )
    total = TextReport()
    total.add(report)
    total.add(TextReport(1, 1, 0))
    total.dropped.update({chr(0x4E00 + number): 1 for number in range(30)})
    assert str(total).startswith("normalised 1,205 of 28,540 texts; ")
    assert str(total).endswith(" and 13 more; 2 empty")


# -- labels that lack the language's letters ---------------------------------------------------------------------------


def refused(texts: list[str], labels: Labels = ENGLISH, mode: TextMode = "en", is_training: bool = True) -> str:
    report = encode_all(texts, labels, mode)[1]
    error = LabelsLackLetters("train", report, labels, mode, is_training)
    return f"{error}\n  {error.hint}"


@pytest.mark.parametrize(
    ("text", "labels", "mode", "num_words", "num_hurt"),
    [
        ("the cat's 12 mice, café-owner", ENGLISH, "en", 4, 1),
        ("die Straße ist schön", ENGLISH, "en", 4, 2),
        ("Guten Tag", ENGLISH, "basic", 2, 0),
        ("Guten Tag", ENGLISH, "none", 2, 2),
        ("cost 5 pounds", ENGLISH, "basic", 3, 1),
        ("你好吗 hello", ENGLISH, "en", 4, 3),
        ("你好", CHINESE, "en", 2, 0),
        ("Straße", UPPER, "basic", 1, 0),
        ("wait - \u00ab no \u00bb ...", ENGLISH, "basic", 5, 0),
        ("", ENGLISH, "en", 0, 0),
    ],
)
def test_words_that_lose_letters(text: str, labels: Labels, mode: TextMode, num_words: int, num_hurt: int) -> None:
    """Punctuation and case are no loss; an accent, a letter or a digit that is dropped makes another word."""
    normalized = normalize(text, labels, mode)
    assert (normalized.num_words >= num_words, normalized.num_hurt) == (True, num_hurt)
    report = encode_all(["a b", text], Labels((*labels.symbols, *({" ", "a", "b"} - labels.characters))), mode)[1]
    assert report.num_words == normalized.num_words + 2


def test_the_labels_to_set_are_shown_and_cover_the_texts() -> None:
    texts = ["Die Straße ist schön", "Übermut", "ein Tag"]
    message = refused(texts)
    assert message.startswith("train: 42.9% of the words lose letters that are not among the labels: Ü 1, ß 1, ö 1")
    assert "'Die Straße ist schön' becomes 'die strae ist schon'" in message
    symbols = " abcdefghijklmnopqrstuvwxyz'ßöü"
    assert f'`--labels "{symbols}"`, in YAML `labels: "{symbols}"`' in message
    assert message.endswith("`--max-lost-words 0.44` goes on without them")
    assert encode_all(texts, Labels(tuple(symbols)), "en")[1].num_hurt == 0


def test_text_rules_are_the_better_advice_where_they_are_enough() -> None:
    assert "with `--text-rules basic`" in refused(["HELLO"], mode="none")
    assert "with `--text-rules en`" in refused(["take 7"], mode="basic")
    assert "`--text-rules basic --labels " in refused(["Die Straße"], mode="none")
    assert "--text-rules" not in refused(["nimm 7 Äpfel"], mode="basic"), "English numbers for no other language"
    assert "the model cannot write them" in refused(["Straße"], is_training=False)


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=6), st.sampled_from(["en", "basic", "none"])
)
def test_covering_labels_lose_nothing(texts: list[str], mode: TextMode) -> None:
    report = encode_all(texts, ENGLISH, mode)[1]
    assert 0 <= report.num_hurt <= report.num_words
    lost = [each for each in report.dropped + report.stripped if is_heard(each)]
    again = encode_all(texts, covering(ENGLISH, lost, mode), mode)[1]
    assert again.num_hurt == 0


def test_labels_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text(" aä\n", encoding="utf-8")
    assert read_labels(str(tmp_path / "labels.txt")) == read_labels([" ", "a", "ä"]) == read_labels(" aä") == " aä"
    with pytest.raises(ValueError, match="cannot be read"):
        read_labels("absent.txt")


@pytest.mark.parametrize("name", ["fsdd", "librispeech", "mini-librispeech"])
def test_real_transcripts_lose_nothing(name: str) -> None:
    folder = Path(__file__).parents[5] / "shared" / "data" / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    for manifest in folder.glob("*.json"):
        texts = [json.loads(line)["text"] for line in manifest.read_text().splitlines()]
        assert encode_all(texts, ENGLISH, "en")[1].num_hurt == 0
