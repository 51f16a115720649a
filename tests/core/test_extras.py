"""Packages of extras that are not installed: the extra is named, by commands and by recipes.

On ce01e4b `train digits` and `demo` without extras ended in ModuleNotFoundError.
"""

from __future__ import annotations

import sys

import pytest

import paceline
from paceline.cli.main import main
from paceline.core.extras import extra_of, extras
from paceline.recipes.digits import Digits


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make imports of packages, and of what was imported with them, fail as if they were not installed."""
    gone = [
        name
        for name in sys.modules
        if name.partition(".")[0] in packages
        or name.startswith(("paceline.recipes.speech", "paceline.recipes.speech.audio"))
    ]
    for name in gone:  # what is imported anew meanwhile must not stay as an attribute of its package
        package, _, child = name.rpartition(".")
        if package and hasattr(sys.modules.get(package), child):
            monkeypatch.setattr(sys.modules[package], child, getattr(sys.modules[package], child))
    for name in gone:
        monkeypatch.delitem(sys.modules, name)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def test_digits_without_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "sklearn")
    with pytest.raises(paceline.PacelineError, match="the recipe 'digits' needs the package sklearn") as error:
        paceline.fit(Digits(), epochs=1, progress="none")
    assert error.value.hint == "pip install 'paceline[demo]'"
    assert main(["train", "digits", "--epochs", "1", "--progress", "none", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert ("pip install 'paceline[demo]'" in said, "Traceback" in said) == (True, False)


def test_demo_without_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "soundfile")
    assert main(["demo"]) == 2
    said = capsys.readouterr().err
    assert "`paceline demo` needs the package soundfile, which is not installed" in said
    assert "pip install 'paceline[demo]'" in said


@pytest.mark.parametrize(
    ("package", "wanted", "extra"),
    [
        ("soundfile", "", "asr"),
        ("soundfile", "demo", "demo"),
        ("tokenizers", "asr", "asr"),
        ("tokenizers", "continual", "translation"),
        ("sklearn", "digits", "demo"),
        ("h5py", "", "pack"),
        ("transformers", "", None),
    ],
)
def test_extra_is_the_wanted_or_the_smallest_that_installs_a_package(
    package: str, wanted: str, extra: str | None
) -> None:
    assert extra_of(package, wanted) == extra


def test_extras_include_the_extras_they_name() -> None:
    assert extras()["asr"] < extras()["demo"]
