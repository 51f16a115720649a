"""Words in the reader's language: who decides it, what falls back to English, and what never changes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from paceline.core.errors import NotFound, PacelineError
from paceline.core.language import ENGLISH, can_be_written, language, language_of, speaking, translate
from paceline.core.run_folder import RunBusy, RunExists


class _Nested(PacelineError):
    why: PacelineError
    times: int
    sentence = "an example failed {times:#time}: {why}"
    hint = "keep one of them"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_MESSAGES": "zh_TW", "LANG": "de_DE"}, "zh"),
        ({"LC_ALL": "de_DE.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LC_ALL": "", "LANG": "zh_CN.UTF-8"}, "zh"),
        ({"PACELINE_LANG": "en", "LC_ALL": "zh_CN.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"PACELINE_LANG": "zh", "LANG": "en_US.UTF-8"}, "zh"),
        ({"PACELINE_LANG": "ZH-cn"}, "zh"),
        ({"PACELINE_LANG": "fr", "LANG": "zh_CN.UTF-8"}, "en"),
    ],
)
def test_the_variable_wins_over_the_locale(environment: dict[str, str], expected: str) -> None:
    assert language_of(environment) == expected


def test_a_text_without_a_translation_stays_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LANG", "zh")
    assert translate("the table lacks this text") == "the table lacks this text"
    assert translate("is missing") == "缺失"
    monkeypatch.setenv("PACELINE_LANG", "en")
    assert translate("is missing") == "is missing"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("needs 1 value", "需要 1 个值"),  # a number with its noun
        ("needs 1,024 values", "需要 1,024 个值"),
        ("needs many values", "needs many values"),
        ("runs/a is being trained by process 5", "runs/a 正由 process 5 训练"),
        ("runs/a is not a run: it is a file", "runs/a 不是运行：它是文件"),  # a field is translated in turn
        ("did you mean step?", "是否想输入 step？"),  # a single word is a name
        ("--lr abc: is missing", "--lr abc: 缺失"),  # what is joined is translated by itself
        ("  --lr abc: is missing\n    did you mean lr?\n", "  --lr abc: 缺失\n    是否想输入 lr？\n"),
        ("", ""),
    ],
)
def test_a_filled_template_is_translated(text: str, expected: str) -> None:
    with speaking("zh"):
        assert translate(text) == expected


def test_an_error_is_recorded_in_english_and_shown_in_the_readers_language() -> None:
    with speaking("zh"):
        error = RunExists("runs/a")
        shown = "错误：runs/a 中已有一个运行\n  加上 `--resume auto` 继续它，或选择另一个 `--out`"
        assert error.rendered() == pickle.loads(pickle.dumps(error)).rendered() == shown
        assert str(error) == "runs/a holds a run already"
        assert error.args == ("runs/a holds a run already",)
    assert language() == ENGLISH
    assert error.rendered() == f"error: {error}\n  {error.hint}"


def test_an_error_raised_with_its_sentence_is_translated_by_the_words_of_it() -> None:
    with speaking("zh"):
        assert NotFound("there is no command 'tran'").rendered() == "错误：没有命令 'tran'"


def test_an_error_inside_another_is_translated_too() -> None:
    with speaking("zh"):
        shown = _Nested(RunBusy("runs/a", "process 5"), 2).rendered()
    assert shown == "错误：an example failed 2 times: runs/a 正由 process 5 训练\n  只保留其中一个"


@pytest.mark.parametrize(
    ("encodings", "expected"),
    [(("utf-8", "utf-8"), True), (("gbk", None), True), (("utf-8", "ascii"), False), (("iso-8859-1",), False)],
)
def test_chinese_is_spoken_where_it_can_be_written(encodings: tuple[str | None, ...], expected: bool) -> None:
    assert can_be_written("错误：", *encodings) is expected
    assert can_be_written("error: ", *encodings)


def test_a_broken_manifest_is_told_in_chinese(tmp_path: Path) -> None:
    """The likeliest mistake of a speech user: reasons, counts and advice, each in the language of the reader."""
    from paceline.recipes.speech.manifest.bad_line import BadManifest
    from paceline.recipes.speech.manifest.read import read_manifests

    file = tmp_path / "train.json"
    file.write_text('{"audio_filepath": "a.wav", "text": "x"}\n{"audio_filepath":\n', encoding="utf-8")
    with speaking("zh"), pytest.raises(BadManifest) as caught:
        read_manifests(str(file))
    error = caught.value
    with speaking("zh"):
        shown = error.rendered()
        assert "中有 2 行不能使用" in shown
        assert '缺少 "duration"' in shown
        assert "不是 JSON" in shown
        assert "请修正它们" in shown
    assert "2 bad lines in" in str(error)
    assert '"duration" is missing' in str(error)
