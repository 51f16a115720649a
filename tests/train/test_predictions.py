from __future__ import annotations

import json

import pytest
import torch

from paceline.core.errors import TaskContract
from paceline.train import predictions as outcome
from paceline.world.link import Link
from tests.ranks import ranks


def test_lines() -> None:
    assert outcome.text_line(3, "two words") == "3\ttwo words\n"
    assert outcome.text_line(4, "a\nb") == '4\t"a\\nb"\n'
    assert outcome.text_line(5, torch.tensor([1, 2])) == "5\t[1, 2]\n"
    assert json.loads(outcome.json_line(6, {"text": "ja", "score": torch.tensor(0.5), "bad": float("nan")})) == {
        "index": 6,
        "prediction": {"text": "ja", "score": 0.5, "bad": None},
    }
    names = ["a.flac", "b.flac"]
    assert outcome.text_line(1, "seven", names) == "b.flac\tseven\n"
    assert json.loads(outcome.json_line(1, "seven", names)) == {"index": 1, "name": "b.flac", "prediction": "seven"}
    with pytest.raises(TaskContract, match="holds a set"):
        outcome.json_line(0, {1, 2})


def test_a_table_has_one_line_per_set() -> None:
    shown = outcome.table({"dev/loss": 0.25, "dev/wer": 12.5, "test-other/loss": 1234.5})
    assert shown == "set           loss   wer\ndev           0.25  12.5\ntest-other  1234.5     -\n"


@ranks(1, 2)
def test_details_cross_ranks_whole(link: Link) -> None:
    made = outcome.DetailedText("two words", {"score": -0.5, "words": [{"word": "two", "start": link.world.rank}]})
    for rank, text in enumerate(link.gather_objects(made)):
        assert outcome.text_line(0, text) == "0\ttwo words\n"
        assert outcome.bare_line(0, text) == "two words\n"
        assert json.loads(outcome.json_line(0, text)) == {
            "index": 0,
            "prediction": "two words",
            "score": -0.5,
            "words": [{"word": "two", "start": rank}],
        }
