"""The words that `python -m torch.distributed.launch` passes (captured: `--local-rank=1 train digits`)."""

from __future__ import annotations

import pytest

from paceline.cli.main import main
from paceline.world.discover.environment import EnvironmentContradicts, EnvironmentIncomplete
from paceline.world.discover.local_rank import without_local_rank


@pytest.mark.parametrize("words", [["--local-rank=1"], ["--local_rank=1"], ["--local-rank", "1"]])
def test_it_is_taken_off(words: list[str]) -> None:
    rest = ["train", "digits", "--local-rank=7"]
    assert without_local_rank([*words, *rest], {"LOCAL_RANK": "1"}) == rest


def test_other_words_stay() -> None:
    for words in ([], ["train", "--local-rank=1"], ["--local-rankle"]):
        assert without_local_rank(words, {}) == words


@pytest.mark.parametrize("words", [["--local-rank=2"], ["--local-rank="], ["--local-rank"], ["--local_rank", "two"]])
def test_it_must_agree_with_the_environment(words: list[str]) -> None:
    with pytest.raises(EnvironmentContradicts, match="LOCAL_RANK"):
        without_local_rank(words, {"LOCAL_RANK": "1"})
    with pytest.raises(EnvironmentIncomplete, match="LOCAL_RANK"):
        without_local_rank(words, {})


def test_a_contradiction_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["--local-rank=0", "--version"]) == 0
    assert capsys.readouterr().out.startswith("paceline ")
    assert main(["--local-rank=3", "train", "digits"]) == 2
    assert capsys.readouterr().err.startswith("error: --local-rank, LOCAL_RANK: 3 and 0\n")
