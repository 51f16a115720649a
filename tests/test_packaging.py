"""Wheel and source archive are whole: what is installed from them, outside of the repository, runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from paceline import __version__

REPOSITORY = Path(__file__).parents[1]
NOT_OURS = shutil.ignore_patterns(
    ".git", ".venv", ".carry", "__pycache__", ".*_cache", "*.egg-info", "site", "build", "dist", ".hypothesis"
)
BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with both, built from a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("packaging")
    shutil.copytree(REPOSITORY, folder / "source", ignore=NOT_OURS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, folder / "dist"],
        cwd=folder / "source",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "dist"


def files_of(folder: Path, root: str, suffixes: str) -> set[str]:
    """Ours below a folder of the repository, by their path in it."""
    found = (path for path in (REPOSITORY / root).rglob("*") if path.is_file() and re.search(suffixes, path.name))
    names = (path.relative_to(folder).as_posix() for path in found)
    return {name for name in names if "__pycache__" not in name and "/." not in name}


def test_the_wheel_has_every_module_and_data_file(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert wheel.name == f"paceline-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = archive.read(f"paceline-{__version__}.dist-info/METADATA").decode()
    wanted = files_of(REPOSITORY / "src", "src/paceline", r"\.(py|yaml|html|js|css|typed)$")
    assert wanted <= names, sorted(wanted - names)
    assert not [name for name in names if not name.startswith("paceline")]
    for extra in ("asr", "wandb", "mlflow", "all"):
        assert f"Provides-Extra: {extra}\n" in about
    assert "License-Expression: Apache-2.0" in about


def test_the_source_archive_can_be_tested_and_built_again(built: Path) -> None:
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "CITATION.cff",
        "SECURITY.md",
        "LICENSE",
        ".ci/run",
        "mkdocs.yml",
    }
    for root in ("src", "tests", "docs", "examples", "benchmarks"):
        wanted |= files_of(REPOSITORY, root, r"\.(py|md|yaml|json)$")
    wanted = {name for name in wanted if ".egg-info" not in name}
    assert wanted <= names, sorted(wanted - names)


WITHOUT = {"soundfile", "soxr", "rapidfuzz", "h5py", "tokenizers", "sacrebleu", "kenlm", "plotly", "tensorboard"}
"""Packages of extras: of the recipes, of reports and of loggers."""


@pytest.fixture
def bare(built: Path, tmp_path: Path) -> Path:
    """Folder with the wheel and links to the packages that are installed here, except those of extras."""
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "bare")
    for path in Path(torch.__file__).parents[1].iterdir():
        name = re.split(r"[-.]", path.name.lower())[0]
        if name not in {*WITHOUT, "paceline", "__editable__"} and path.suffix != ".pth":
            (tmp_path / "bare" / path.name).symlink_to(path)
    return tmp_path / "bare"


def test_the_core_works_without_the_extras_of_the_recipes(bare: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(bare), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *words]  # without the packages of this environment
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    found = f"import paceline, importlib.util as u; print(paceline.__file__, [*filter(u.find_spec, {sorted(WITHOUT)})])"
    assert run("-c", found).stdout == f"{bare / 'paceline' / '__init__.py'} []\n"
    assert "train" in run("-m", "paceline", "--help").stdout
    done = run("-m", "paceline", "train", "digits", "--steps", "3", "--out", "run", "--progress", "lines")
    assert "finished" in done.stdout, done.stderr
    assert "torch" in run("-m", "paceline", "doctor").stdout
    refused = run("-m", "paceline", "train", "speech", "--steps", "3")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "pip install 'paceline[asr]'" in refused.stderr


def test_what_is_installed_runs_elsewhere(built: Path, tmp_path: Path) -> None:
    """The wheel alone, with the dependencies that are here: commands, a training, its report's words."""
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "paceline", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("--version").strip() == f"paceline {__version__}"
    code = "import paceline; print(paceline.__file__)"
    where = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert where.stdout.startswith(str(tmp_path / "installed")), where.stdout + where.stderr
    assert "finished" in run("train", "digits", "--steps", "3", "--out", "run", "--progress", "lines")
    assert "digits" in run("runs", ".")


def test_the_version_is_in_one_place() -> None:
    assert f"version: {__version__}" in (REPOSITORY / "CITATION.cff").read_text()
    assert 'dynamic = ["version"]' in (REPOSITORY / "pyproject.toml").read_text()
    assert f"## {__version__}" in (REPOSITORY / "CHANGELOG.md").read_text()
