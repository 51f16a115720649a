from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import main
from paceline.lab.predict.report import PredictReport
from paceline.observe.report.page import sections
from paceline.observe.report.runs import read_runs
from tests.lab.predict.folders import make_run


def test_what_eight_machines_bring_is_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/first"))
    assert main(["predict", "runs/first", "--nodes", "8"]) == 0
    shown = capsys.readouterr().out
    assert "it pays up to 8 ranks" in shown
    assert "machines are linked by 10 Gbit/s, 50 us" in shown
    assert "not known: other traffic" in shown
    assert "`paceline report runs/first` draws it" in shown


def test_json_is_what_python_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a")
    words = ["--ranks", "2,6,64", "--link", "1Gbit,100us", "--price", "2", "--failures", "4/1000nd", "--wire", "bf16"]
    assert main(["predict", str(folder), *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    answer = paceline.predict(folder, ranks=[2, 6, 64], link="1Gbit,100us", price=2, failures="4/1000nd", wire="bf16")
    assert printed == json.loads(json.dumps(answer.to_json()))
    assert [row["ranks"] for row in printed["rows"]] == [2, 6, 64]
    assert all(row["price"]["low"] < row["price"]["high"] for row in printed["rows"])
    assert not (folder / "predict.json").exists()


def test_machines_have_as_many_ranks_as_in_the_run_on_fewest(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", ranks=2, compute_s=0.12)
    places = {
        sources: [(row.ranks, row.nodes) for row in paceline.predict(list(sources), nodes=[2, 4]).rows]
        for sources in ((one,), (one, two), (two,))
    }
    assert places == {
        (one,): [(2, 2), (4, 4)],
        (one, two): [(2, 2), (4, 4)],
        (two,): [(4, 2), (8, 4)],
    }


def test_the_report_draws_what_was_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a")
    reports = [PredictReport()]
    assert "predict" not in [part.name for part in sections(read_runs([folder], reports)) if not part.is_empty]
    assert main(["predict", str(folder), "--ranks", "1,2,4,8"]) == 0
    (part,) = [part for part in sections(read_runs([folder], reports)) if part.name == "predict"]
    speed, parts = part.figures
    band, curve, ideal = speed.traces
    assert curve["x"] == [1, 2, 4, 8]
    assert band["x"] == [1, 2, 4, 8, 8, 4, 2, 1]
    assert all(low < middle < high for low, middle, high in zip(band["y"][:3:-1], curve["y"], band["y"], strict=False))
    assert ideal["y"][3] == pytest.approx(8 * ideal["y"][0])
    assert len(parts.traces) == 5
    (folder / "predict.json").write_text('{"rows": [{"ranks": "many"}]}', encoding="utf-8")
    assert "predict" not in [part.name for part in sections(read_runs([folder], reports)) if not part.is_empty]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("", "SOURCE: is missing", "paceline predict --help"),
        ("runs/none", "runs/none is not a run: there is no such folder", "paceline runs"),
        ("runs/a --link fast", "`--link fast` has no bandwidth", "--link 10Gbit,50us"),
        ("runs/a --link 1Gbit,soon", "'soon' is not a latency", "--link 10Gbit,50us"),
        (
            "runs/a --link 1Gbit --link-file doctor.json",
            "`--link` and `--link-file` cannot be used together",
            "one of them",
        ),
        ("runs/a --link-file doctor.json", "cannot be read", "paceline doctor --json"),
        ("runs/a --ranks 0", "--ranks 0: value 1 must be above 0", "paceline predict --help"),
        ("runs/a --ranks 2 --nodes 4", "2 ranks cannot be on 4 machines", "--nodes"),
        ("runs/a --wire int8", "wire int8 is for reduce param", "docs/options.md"),
        ("runs/a --failures often", "`--failures often`", "4/1000nd"),
        ("runs/a --shard node", "`--shard node` cannot be predicted", "--shard full"),
        ("runs/a --random-seed 1", "--random-seed", "paceline predict --help"),
        ("digits --ranks 8", "digits is not a run", "paceline train TASK --steps 40"),
    ],
)
def test_mistakes_are_told_with_what_to_type(
    words: str,
    said: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"))
    assert main(["predict", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert hint in error
