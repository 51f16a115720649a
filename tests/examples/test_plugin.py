"""Plugin package of examples/plugin, installed with pip: found, used on 1 and 2 ranks, recorded, resumed."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import torch

import paceline
from paceline.core import plugins
from paceline.core.torch_private import defer_compiler
from tests.commands import Ended, run_command
from tests.examples.scripts import EXAMPLES

TRAIN = ["train", "rings", "--epochs", "2", "--num-points", "64", "--global-batch", "32", "--grains", "2"]
ALL = [*TRAIN, "--optimizer", "lion", "--lr", "0.003", "--schedule", "wsd", "--loggers", "csv"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    copytree(EXAMPLES / "plugin", folder / "source")  # building leaves files behind
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", folder / "site", folder / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def site(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the installed package, on Python's path."""
    folder = copytree(installed, tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.delenv(plugins.SWITCH, raising=False)
    monkeypatch.chdir(tmp_path)
    plugins._scan.cache_clear()
    return folder


def _run(words: list[str]) -> Ended:
    return run_command(words, PYTHONPATH=os.environ["PYTHONPATH"])


def _weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = max((run / "checkpoints").glob("step-*"))
    return {name: value for file in newest.glob("model*.safetensors") for name, value in load_file(file).items()}


def test_a_run_uses_records_and_resumes_them(site: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = _run([*ALL, "--out", str(run)])
    assert done.code == 0, done.err
    assert "Lion" in done.out
    assert "wsd over 4 steps" in done.out
    start = json.loads((run / "run.json").read_text())["starts"][0]
    assert [(each["group"], each["name"]) for each in start["plugins"]] == [
        ("recipes", "rings"),
        ("optimizers", "lion"),
        ("schedules", "wsd"),
        ("loggers", "csv"),
    ]
    assert {(each["package"], each["version"]) for each in start["plugins"]} == {("paceline-example", "1.0")}
    with (run / "numbers.csv").open() as file:
        names = {name for _, name, _ in csv.reader(file)}
    assert {"loss", "lr", "val/accuracy"} <= names

    ranks = _run([*ALL, "--out", str(tmp_path / "two"), "--procs", "2"])
    assert ranks.code == 0, ranks.err
    one, two = _weights(run), _weights(tmp_path / "two")
    assert one
    assert all(torch.equal(one[name], two[name]) for name in one)

    (site / "paceline_example-1.0.dist-info").rename(site / "paceline_example-1.1.dist-info")
    metadata = site / "paceline_example-1.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    again = _run([*ALL, "--out", str(run), "--resume", "auto"])
    assert again.code == 0, again.err
    said = "the optimizer 'lion' is now of paceline-example 1.1; the run was last started with paceline-example 1.0"
    assert said in again.out

    gone = _run(["eval", str(run), "--no-plugins"])
    assert (gone.code, "Traceback" in gone.err) == (2, False)
    assert "the recipe 'rings' of paceline-example 1.1, which is not installed" in gone.err


def test_its_command_and_report_section_are_used_like_ours(site: Path, tmp_path: Path) -> None:
    assert "points" in _run(["--help"]).out
    points = _run(["points", "3"])
    assert (points.code, len(points.out.splitlines())) == (0, 3), points.err
    refused = _run(["points", "0"])
    assert (refused.code, "Traceback" in refused.err) == (2, False)

    pytest.importorskip("plotly", reason="plotly is not installed")
    assert _run([*TRAIN, "--out", str(tmp_path / "run")]).code == 0
    report = _run(["report", str(tmp_path / "run")])
    assert report.code == 0, report.err
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The two circles" in page
    assert "width of the network" in page


def test_a_recipe_that_python_trained_is_found_again(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be not installed: the run had its class's name, not the recipe's."""
    for name in ("paceline_example", "paceline_example.rings"):
        monkeypatch.setitem(sys.modules, name, None)  # put back afterwards
        del sys.modules[name]
    rings = importlib.import_module("paceline_example.rings").Rings
    result = paceline.fit(rings(), epochs=1, num_points=64, out=tmp_path / "run", progress="none", device="cpu")
    assert isinstance(paceline.load(tmp_path / "run"), type(result.model))


def test_a_broken_part_stops_only_who_uses_it(site: Path, tmp_path: Path) -> None:
    (site / "paceline_example" / "lion.py").write_text("import no_such_module\n")
    fine = _run([*TRAIN, "--out", str(tmp_path / "fine")])
    assert fine.code == 0, fine.err
    broken = _run([*ALL, "--out", str(tmp_path / "broken")])
    assert broken.code == 2
    assert "the optimizer 'lion' of paceline-example 1.0 cannot be loaded: ModuleNotFoundError" in broken.err
    assert "Traceback" not in broken.err
    assert not (tmp_path / "broken").exists()


def test_the_doctor_lists_them(site: Path, tmp_path: Path) -> None:
    table = _run(["doctor", "--json"])
    [entry] = [each for each in json.loads(table.out) if each["what"] == "plugins"]
    assert entry["verdict"] == "ok"
    assert "optimizer lion (paceline-example 1.0)" in entry["found"]
    assert "launcher flux.FLUX_TASK_RANK (paceline-example 1.0)" in entry["found"]
    without = json.loads(_run(["doctor", "--json", "--no-plugins"]).out)
    assert [each["found"] for each in without if each["what"] == "plugins"] == ["left out (`--no-plugins`)"]


def test_a_plugin_with_a_name_of_ours_is_refused(site: Path, tmp_path: Path) -> None:
    entries = site / "paceline_example-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text().replace("lion =", "adamw ="))
    refused = _run([*TRAIN, "--out", str(tmp_path / "run")])
    assert refused.code == 2
    assert "the optimizer 'adamw' is offered by paceline itself and paceline-example 1.0" in refused.err
    assert not (tmp_path / "run").exists()


def test_lion_is_the_formula(site: Path) -> None:
    from importlib import import_module

    defer_compiler()
    lion = import_module("paceline_example.lion").Lion
    try:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, device="cpu"))
        optimizer = lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)
        expected, moment = [1.0, -2.0, 3.0], [0.0, 0.0, 0.0]
        for gradient in ([0.5, -1.0, 0.0], [-0.1, 0.3, 2.0]):
            weight.grad = torch.tensor(gradient, dtype=torch.float64, device="cpu")
            optimizer.step()
            for place, value in enumerate(gradient):
                blend = 0.9 * moment[place] + 0.1 * value
                expected[place] = expected[place] * (1 - 0.001) - 0.1 * ((blend > 0) - (blend < 0))
                moment[place] = 0.99 * moment[place] + 0.01 * value
        torch.testing.assert_close(weight.detach(), torch.tensor(expected, dtype=torch.float64, device="cpu"))
    finally:
        for name in [name for name in sys.modules if name.startswith("paceline_example")]:
            del sys.modules[name]
