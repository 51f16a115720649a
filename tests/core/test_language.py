"""Words in the reader's language: who decides it, what falls back to English, and what never changes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.core.language import ENGLISH, can_be_written, language, language_of, phrase, said, speaking
from paceline.core.run_folder import NotARun, RunBusy, RunExists


class _Nested(PacelineError):
    why: PacelineError
    times: int
    sentence = "there is no such thing, {times:#time}: {why}"
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


def test_a_text_without_a_translation_is_said_in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LANG", "zh")
    assert said("nobody has written this down") == "nobody has written this down"
    assert said("is missing") == "缺失"
    monkeypatch.setenv("PACELINE_LANG", "en")
    assert said("is missing") == "is missing"


def test_an_error_speaks_to_its_reader_and_is_recorded_in_english() -> None:
    with speaking("zh"):
        error = RunExists("runs/a")
        assert str(error) == "runs/a 中已有一个运行"
        assert error.hint == "加上 `--resume auto` 继续它，或选择另一个 `--out`"
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        with speaking(ENGLISH):
            assert str(error) == str(again) == "runs/a holds a run already"
    assert language() == ENGLISH
    assert str(error) == "runs/a holds a run already"
    assert error.args == ("runs/a holds a run already",)


def test_an_error_inside_of_another_is_recorded_in_english_too() -> None:
    with speaking("zh"):
        error = _Nested(RunBusy("runs/a", "process 5"), 2)
        assert str(error) == "there is no such thing, 2 times: runs/a 正由 process 5 训练"
        assert error.hint == "只保留其中一个"
    assert str(error) == "there is no such thing, 2 times: runs/a is being trained by process 5"


def test_words_in_a_field_are_english_and_said_with_their_sentence() -> None:
    why = phrase("cannot be read: {why}", why=phrase("there is no such file"))
    assert why == "cannot be read: there is no such file"
    with speaking("zh"):
        assert f"{why}" == "无法读取：没有这个文件"
        assert str(why) == "cannot be read: there is no such file"
        assert pickle.loads(pickle.dumps(why)) == str(why)
        error = NotARun("runs/a", phrase("it is a file"))
        assert str(error) == "runs/a 不是运行：它是文件"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error) == "runs/a is not a run: it is a file"
    assert error.why == "it is a file"


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
        assert "中有 2 行不能使用" in str(error)
        assert '缺少 "duration"' in str(error)
        assert "不是 JSON" in str(error)
        assert error.hint.startswith("请修正它们")
    with speaking("en"):
        assert "2 bad lines in" in str(error)
        assert '"duration" is missing' in str(error)
