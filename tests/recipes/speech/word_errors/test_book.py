"""Kinds of errors, worst utterances and speakers: counted by hand, at any number of ranks, in file and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.observe.journal import read
from paceline.observe.report.runs import read_run
from paceline.recipes.speech.report import AsrReport
from paceline.recipes.speech.text.error_rate import WordEdits, word_edits, word_errors
from paceline.recipes.speech.word_errors.book import ErrorBook, joined
from paceline.recipes.speech.word_errors.file import ERRORS, MOST_CHARACTERS, MOST_SPEAKERS, NUM_WORST
from tests.observe.report.made import usual, write_run
from tests.recipes.speech import tiny

HEARD = [
    (0, "a b c", "a b c", "ann"),
    (1, "a b c", "a x c", "ann"),
    (2, "a b c d", "c d", "bob"),
    (3, "a", "a b b", "bob"),
    (4, "", "b", None),
]
SPEAKERS = {sample: speaker for sample, _, _, speaker in HEARD if speaker is not None}
texts = st.lists(st.sampled_from("abcd"), max_size=6).map(" ".join)


def test_word_errors_are_counted_by_kind() -> None:
    assert word_edits("a b c", "a x c") == WordEdits(1, 0, 0, 3)
    assert word_edits("a b c d", "c d") == WordEdits(0, 2, 0, 4)
    assert word_edits("a", "a b b") == WordEdits(0, 0, 2, 1)
    assert word_edits("", "b") == WordEdits(0, 0, 1, 0)


@given(texts, texts)
def test_kinds_add_up_to_all_word_errors(reference: str, hypothesis: str) -> None:
    edits = word_edits(reference, hypothesis)
    assert (edits.errors, edits.words) == word_errors(reference, hypothesis)
    assert edits.words - edits.deletions + edits.insertions == len(hypothesis.split())


def test_analysis_is_the_same_on_any_number_of_ranks() -> None:
    def analysis(ranks: int) -> object:
        books = [ErrorBook() for _ in range(ranks)]
        for sample, reference, hypothesis, _ in HEARD:
            books[sample % ranks].note(sample, reference, hypothesis)
        return joined([book.take(str, SPEAKERS) for book in books])

    one = analysis(1)
    assert analysis(2) == analysis(4) == one
    assert one == {
        **{"words": 11, "substitutions": 1, "deletions": 2, "insertions": 3},
        **{"speakers": {"ann": [1, 6], "bob": [4, 5]}, "num_speakers": 2},
        "worst": [
            {
                "name": str(n),
                "speaker": who,
                "errors": e,
                "words": w,
                "reference": HEARD[n][1],
                "hypothesis": HEARD[n][2],
            }
            for n, who, e, w in ((2, "bob", 2, 4), (3, "bob", 2, 1), (1, "ann", 1, 3), (4, None, 1, 0))
        ],
    }


def test_analysis_of_many_utterances_has_a_bounded_size() -> None:
    book = ErrorBook()
    for sample in range(1000):
        book.note(sample, "a " * 200, f"{sample} " * 200)
    found = joined([book.take(lambda sample: "x" * 5000, {sample: f"s{sample}" * 500 for sample in range(1000)})])
    assert (len(found["worst"]), len(found["speakers"]), found["num_speakers"]) == (NUM_WORST, MOST_SPEAKERS, 1000)
    assert len(found["worst"][0]["reference"]) == MOST_CHARACTERS
    assert len(json.dumps(found)) < 120_000
    assert book.take(str, {})["words"] == 0, "taken once"


def test_report_page_shows_the_analysis_of_a_run(tmp_path: Path) -> None:
    tiny.speech(tmp_path, "train", 8, seed=1)
    tiny.speech(tmp_path, "dev", 4, seed=2)
    lines = [{**line, "speaker": f"<speaker {n % 2}>"} for n, line in enumerate(tiny.lines_of(tmp_path / "dev.json"))]
    tiny.manifest(tmp_path / "dev.json", lines)
    run = tmp_path / "run"
    metrics = tiny.train(tiny.settings(tmp_path, out=run)).validation.metrics
    (record,) = read(run / "metrics.jsonl", "validation")
    counts = record["analysis"]["dev"]
    errors = counts["substitutions"] + counts["deletions"] + counts["insertions"]
    assert errors / counts["words"] == metrics["dev/wer"]
    found = json.loads((run / ERRORS).read_text())["dev"]
    assert found["speakers"].keys() == {"<speaker 0>", "<speaker 1>"}
    assert sum(sums[0] for sums in found["speakers"].values()) == errors
    (section,) = AsrReport().sections([read_run(run)])
    assert [figure.title for figure in section.figures] == ["Kinds of errors: dev"]
    assert "&lt;speaker 0&gt;" in section.text
    assert "Worst utterances" in section.text
    assert "<speaker" not in section.text
    assert main(["report", str(run)]) == 0


def test_report_page_leaves_out_a_missing_or_damaged_analysis(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", usual())
    (section,) = AsrReport().sections([read_run(run)])
    assert section.is_empty
    for nonsense in ("{", "[]", '{"dev": 1}', '{"dev": {"words": "x"}}', '{"dev": {"words": 1e999}}', "[" * 100_000):
        (run / ERRORS).write_text(nonsense)
        (section,) = AsrReport().sections([read_run(run)])
        assert section.is_empty
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "validation", "step": 9, "analysis": {"dev": {"words": 0}, "x": {}}}) + "\n")
    assert AsrReport().sections([read_run(run)])[0].is_empty


def test_a_validation_set_without_words_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.speech(tmp_path, "train", 4, seed=1)
    dev = tiny.speech(tmp_path, "dev", 2, seed=2)
    silent = tiny.manifest(dev, [{**line, "text": ""} for line in tiny.lines_of(dev)])
    tiny.train(tiny.settings(tmp_path, epochs=2, val_manifest=(str(silent),)))
    assert capsys.readouterr().out.count("dev: all references are empty, so its WER is undefined (") == 1
