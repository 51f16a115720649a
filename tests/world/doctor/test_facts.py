from __future__ import annotations

from pathlib import Path

from paceline.core.extras import extras
from paceline.world.discover.environment import discover
from paceline.world.doctor.facts import collect, existing, optional_packages


def test_optional_packages_are_those_of_registered_recipes_and_of_the_core() -> None:
    needed_by = optional_packages()
    assert needed_by["tensorboard"] == "logs"
    assert needed_by["soundfile"] == "recipe asr"
    assert extras()["translation"] <= needed_by.keys()
    assert "ray" not in needed_by


def test_each_optional_package_is_either_installed_or_missing(tmp_path: Path) -> None:
    facts = collect(discover({}), tmp_path, threads=1)
    assert facts.packages.keys() | facts.missing_packages.keys() == optional_packages().keys()
    assert not facts.packages.keys() & facts.missing_packages.keys()


def test_existing_folder_above_is_found(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
