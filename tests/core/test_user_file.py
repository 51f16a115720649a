"""Users' files: a class by its address, and an error shown from the user's file on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DEFINED = """
class Plain:
    pass

class Made:
    def __init__(self, fold):
        self.fold = fold

def make():
    class Inner:
        pass
    return Inner
"""


def test_a_class_is_found_again_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "defined.py"
    file.write_text(DEFINED)
    module = import_file(file, "thing")
    assert module is not None
    assert spec_of(module.Plain) == f"{file}:Plain"
    assert class_from_file("thing", spec_of(module.Plain), object).__name__ == "Plain"
    for unknown in (module.Made, module.make(), Base, pytest.Item):  # arguments, in a function, packages
        assert spec_of(unknown) == ""


def test_the_program_itself_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "program.py"
    file.write_text("raise SystemExit('run again')\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)
    assert import_file(file, "thing") is sys.modules["__main__"]


def test_a_file_that_trains_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trains.py"
    file.write_text("import paceline\npaceline.fit(paceline.Task(), epochs=1)\n")
    with pytest.raises(TrainsOnImport, match="trains.py calls paceline.fit while it is imported"):
        import_file(file, "thing")
    file.write_text("import paceline\npaceline.sweep('digits', {'lr': '1:2'}, epochs=1)\n")
    with pytest.raises(TrainsOnImport, match="trains.py calls paceline.sweep while it is imported"):
        import_file(file, "thing")
    refuse_on_import("paceline.fit")  # nothing is left of it
