"""`paceline compare`: groups, differences, steps, notes and refusals, on runs whose files are written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.main import main
from paceline.lab.compare.comparison import steps_to
from paceline.observe.sample_scores import SampleScores, write_scores

LOSSES = {"adamw": (0.52, 0.50, 0.51), "muon": (0.41, 0.40, 0.42)}


def make(folder: Path, curve: list[float], metric: str = "dev/loss", task: str = "own.py:T", **settings: Any) -> Path:
    """Write a run that was validated every 10 steps."""
    folder.mkdir(parents=True)
    record = {"task": task, "status": "finished", "settings": settings, "grains": 1, "starts": []}
    (folder / "run.json").write_text(json.dumps(record))
    lines = [{"kind": "step", "step": 0, "epoch": 1, "loss": 1.0, "lr": 0.1}]
    for number, value in enumerate(curve, 1):
        lines.append({"kind": "validation", "step": 10 * number - 1, "epoch": number, "seconds": 1.0, metric: value})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for optimizer, finals in LOSSES.items():
        for seed, final in enumerate(finals):
            curve = [0.9, 0.505 if optimizer == "muon" else 0.7, final]
            settings = {"optimizer": optimizer, "seed": seed, "out": f"o{seed}", "log_every": seed + 1, "lr": 0.01}
            make(tmp_path / f"{optimizer}-{seed}", curve, **settings)
    return tmp_path


def test_grouped_by_what_differs(runs: Path) -> None:
    """Not by the seed, nor by what changes no result."""
    result = paceline.compare(sorted(runs.iterdir()))
    assert [group.settings for group in result.groups] == [{"optimizer": "adamw"}, {"optimizer": "muon"}]
    assert [group.mean for group in result.groups] == pytest.approx([0.51, 0.41])
    (pair,) = result.pairs
    assert pair.difference == pytest.approx(-0.1)
    assert pair.is_better is True
    assert pair.welch is not None
    assert pair.welch.p < 0.001
    assert pair.welch.low < -0.1 < pair.welch.high < 0
    assert pair.permutation is not None
    assert pair.permutation.p == 0.1
    assert pair.bootstrap is None
    assert result.reach == pytest.approx(0.51)
    assert result.groups[1].reached == 20
    assert result.groups[0].reached is None  # one of its runs is above its mean
    assert any("cannot come below 0.1" in note for note in result.notes)
    assert paceline.compare([runs]).to_json() == result.to_json()  # a folder with runs in it


def test_table_and_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *map(str, sorted(runs.iterdir())), "--reach", "0.6"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "dev/loss of own.py:T, last validation; lower is better" in printed
    assert "optimizer muon against optimizer adamw: -0.1 (better)" in printed
    assert "p = 0.1 (20 splits, all)" in printed
    assert "steps to the same value: 1.50 times fewer" in printed
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in values["groups"]] == ["optimizer adamw", "optimizer muon"]
    assert values["pairs"][0]["steps_ratio"] == 1.5


def test_as_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(2):
        make(tmp_path / str(seed), [0.5, 0.4], seed=seed)
    assert main(["compare", str(tmp_path)]) == 2
    assert "compare seeds: `--group seed`" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), "--group", "seed"]) == 0
    assert "steps to the same value: as many" in capsys.readouterr().out


def test_metrics_that_only_some_have_are_not_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", [0.5], metric="dev/loss", lr=1)
    make(tmp_path / "b", [0.5], metric="test/loss", lr=2)
    assert main(["compare", str(tmp_path)]) == 2
    assert "no metric is common to all of these runs" in capsys.readouterr().err


def test_scores_of_samples_are_drawn_anew(tmp_path: Path) -> None:
    words = [(10 + n % 5) for n in range(200)]
    for name, extra in (("a", 2), ("b", 1)):
        errors = [n % 3 + extra for n in range(200)]
        scores = SampleScores.of("ratio", [list(enumerate(zip(errors, words, strict=True)))])
        folder = make(tmp_path / name, [0.9, scores.value()], metric="dev/wer", lr=extra, seed=0)
        write_scores(folder, {"dev": {"wer": scores}})
    result = paceline.compare([tmp_path / "a", tmp_path / "b"], metric="dev/wer")
    (pair,) = result.pairs
    assert pair.welch is None
    assert pair.bootstrap is not None
    assert pair.bootstrap.difference == pytest.approx(pair.difference) == pytest.approx(-200 / sum(words))
    assert pair.bootstrap.p < 0.001
    assert sum("one run" in note for note in result.notes) == 2


def test_scores_of_another_validation_are_not_taken(tmp_path: Path) -> None:
    for name, value in (("a", 0.5), ("b", 0.4)):
        folder = make(tmp_path / name, [value], metric="dev/wer", lr=value, seed=0)
        write_scores(folder, {"dev": {"wer": SampleScores.of("ratio", [[(0, (1, 4))]])}})
    assert paceline.compare([tmp_path / "a", tmp_path / "b"]).pairs[0].bootstrap is None


def test_more_is_better_where_the_name_or_the_run_says_so(tmp_path: Path) -> None:
    for name, value in (("a", 30.0), ("b", 31.0)):
        make(
            tmp_path / name,
            [value - 5, value + 1, value],
            metric="test/bleu",
            monitor="test/bleu",
            lr=value,
            monitor_mode="max",
        )
    assert paceline.compare([tmp_path]).pairs[0].is_better is True
    best = paceline.compare([tmp_path], take="best", mode="min")
    assert [group.mean for group in best.groups] == [25.0, 26.0]
    assert best.pairs[0].is_better is False


def test_groups_by_name_and_what_else_differs(runs: Path) -> None:
    make(runs / "other", [0.3], optimizer="muon", seed=9, lr=0.02)
    result = paceline.compare(sorted(runs.iterdir()), group=["optimizer"])
    assert [len(group.runs) for group in result.groups] == [3, 4]
    assert any("differ, too, in lr" in note for note in result.notes)


def test_steps_to_a_value() -> None:
    curve = [(9, 0.9), (19, 0.5), (29, 0.6)]
    assert [steps_to(curve, goal, is_higher=False) for goal in (0.95, 0.5, 0.4)] == [10, 20, None]
    assert steps_to(curve, 0.9, is_higher=True) == 10


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({}, ["--metric", "dev/wer"], "has no value of `dev/wer`"),
        ({}, ["--group", "optimzer"], "no run has a setting `optimzer`"),
        ({"optimizer": "sgd", "task": "other.py:T"}, [], "different tasks"),
        ({"seed": 7}, ["--group", "lr"], "the same `lr`"),
        ({"seed": 7}, [], "the same settings but for the seed"),
    ],
)
def test_runs_that_cannot_be_compared(
    tmp_path: Path, change: dict[str, Any], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"optimizer": "adamw", "seed": 0, "lr": 0.1}
    make(tmp_path / "a", [0.5], **common)
    make(tmp_path / "b", [0.4], **{**common, **change})
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), *options]) == 2
    assert said in capsys.readouterr().err


def test_too_few_and_twice(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = str(runs / "adamw-0")
    for words, said in (([first], "a comparison of 1 run?"), ([first, first], "given twice"), ([], "is missing")):
        assert main(["compare", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["compare", first, str(runs / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
