"""The table of words in Chinese is whole, has nothing that is said no more, and keeps fields, code and numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.cli.completion import options_of
from paceline.cli.main import COMMANDS, main
from paceline.core.language import words_of

ROOT = Path(__file__).parents[3]
COMMON = (  # what a user meets in the first weeks
    *("is missing", "there is no such option", "there is no such setting", "did you mean {name}?", "must be {what}"),
    *("belongs to no option", "is a flag and takes no value", "needs a value before {word}", "above {limit}"),
    *("a number", "a whole number", "one of {values}", "keep one of them", "there is no such file", "error: "),
    *("{number} mistakes in the settings of `{prog}`", "`{prog} --help` lists all options", "is not YAML: {why}"),
    *("there is no command {name!r}", "{folder} holds a run already", "{folder} is being trained by {owner}"),
)


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_words", ROOT / "tools" / "docs" / "words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


words = _load()


def test_help_of_every_command_and_option_has_a_translation() -> None:
    """Other texts are shown in English until they have one; `python -m tools.docs.words` lists them."""
    missing = words.missing(words.of_help(), words_of("zh"))
    assert missing == [], "add them to src/paceline/core/words.zh.json; `python -m tools.docs.words` lists them"


def test_no_translation_is_of_a_text_that_is_gone() -> None:
    assert words.stale(words.of_code(), words_of("zh")) == [], "`python -m tools.docs.words --write` takes them out"


def test_translations_have_the_fields_the_code_and_the_numbers_of_the_text() -> None:
    assert words.misfits(words_of("zh")) == []
    wrong = {
        "errors": {"{a} of {b!r} `x` 3": "{a} `x` 3", "{n:#rank} is `z`": "{n} 个 rank 是 `y`", "{n:#rank}": "{n}"}
    }
    assert words.misfits(wrong) == ["{a} of {b!r} `x` 3", "{n:#rank} is `z`"]


def test_a_text_that_changed_is_missing_and_its_translation_stale() -> None:
    table = {"errors": {"{folder} is a run": "运行", "gone": "没有"}}
    assert words.missing(["{} is a run", "another", "{} `x`"], table) == ["another"]
    assert words.stale({"{} is a run"}, table) == ["gone"]


def test_the_most_common_messages_are_translated() -> None:
    assert words.missing(COMMON, words_of("zh")) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_in_chinese(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACELINE_LANG", "zh")
    monkeypatch.setenv("COLUMNS", "100")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "用法：" in shown
    if command != "manifest":  # whose help lists its actions
        names = [name for name in options_of(command)[0].model_fields if name not in options_of(command)[1]]
        missing = [name for name in names if f"--{name.replace('_', '-')}" not in shown]
        assert missing == []
        assert {_cells(line) for line in shown.splitlines() if line.startswith("│")} <= {100}


def _cells(line: str) -> int:
    from rich.cells import cell_len

    return cell_len(line)
