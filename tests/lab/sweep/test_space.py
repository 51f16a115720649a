"""What a sweep searches: ranges and choices of settings, with all mistakes at once."""

from __future__ import annotations

import pytest

from paceline import TrainConfig
from paceline.config.problems import SettingsInvalid
from paceline.lab.sweep.space import Choices, Range, read_words, space_of


class Own(TrainConfig):
    hidden: int = 8
    tied: bool = False


def test_words() -> None:
    words = ["lr=1e-5:1e-1:log", "hidden=4:64", "optimizer=adamw", "lamb", "clip-norm=none,1.5", "tied=yes,no"]
    space = space_of(Own, read_words(words, "sweep"), {"epochs": 1}, "sweep")
    assert space == {
        "lr": Range(1e-5, 1e-1, is_log=True),
        "hidden": Range(4, 64, is_whole=True),
        "optimizer": Choices(("adamw", "lamb")),
        "clip_norm": Choices((None, 1.5)),
        "tied": Choices((True, False)),
    }
    assert str(space["lr"]) == "1e-05:0.1:log"


def test_values_from_python() -> None:
    space = space_of(Own, {"hidden": [4, 8], "lr": "0.1:1"}, {"epochs": 1}, "sweep")
    assert space == {"hidden": Choices((4, 8)), "lr": Range(0.1, 1.0)}


def test_all_mistakes_at_once() -> None:
    asked = {
        "hiden": "1,2",
        "lr": "1:0.1",
        "out": "a,b",
        "hidden": "1.5:3",
        "momentum": "0.9",
        "decay": "-1:1:log",
        "weight_decay": "-3,1",
        "seed": "1,2",
    }
    with pytest.raises(SettingsInvalid) as wrong:
        space_of(Own, asked, {"epochs": 1, "seed": 3}, "paceline sweep")
    said = str(wrong.value)
    for line in (
        "hiden 1,2: there is no such setting",
        "did you mean hidden?",
        "lr 1:0.1: must have a finite LOW below HIGH",
        "out a,b: is the same in all trials",
        "hidden 1.5:3: must be of whole numbers",
        "momentum 0.9: needs at least two different values",
        "decay -1:1:log: must be above 0 for a logarithmic scale",
        "weight_decay -3.0: must be at least 0",
        "seed 1,2: is searched and also set to 3",
    ):
        assert line in said, line


@pytest.mark.parametrize("words", [["lr"], ["lr="], ["=3,4"], ["lr=1,2", "lr=3,4"]])
def test_words_of_another_form(words: list[str]) -> None:
    with pytest.raises(SettingsInvalid):
        read_words(words, "sweep")


def test_nothing_to_search() -> None:
    with pytest.raises(SettingsInvalid, match="nothing to search is named"):
        space_of(Own, {}, {"epochs": 1}, "sweep")
