"""Users' files: a class by its address, and an error shown from the user's file on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.core.errors import Conflict, NotFound
from paceline.core.user_file import (
    UserFileFails,
    class_from_file,
    code_of,
    import_file,
    refuse_on_import,
    spec_of,
)


class Base:
    """What a user's class subclasses."""


def test_a_class_is_found_by_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.core.test_user_file import Base\nclass Mine(Base): pass\nclass Other: pass\n")
    assert class_from_file("thing", f"{file}:Mine", Base).__name__ == "Mine"
    with pytest.raises(NotFound, match="there is no thing") as error:
        class_from_file("thing", f"{file}:Other", Base)
    assert error.value.hint == "there: Mine"
    with pytest.raises(NotFound) as error:
        class_from_file("thing", f"{tmp_path / 'none.py'}:Mine", Base)
    assert error.value.hint == "give it as path/to/file.py:ClassName"


def test_an_error_of_the_file_is_shown_from_there_on(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def fail():\n    return 1 / 0\n\nfail()\n")
    with pytest.raises(UserFileFails, match="fails while it is imported") as error:
        import_file(file, "thing")
    shown = str(error.value)
    assert "ZeroDivisionError" in shown
    assert "importlib" not in shown
    assert "paceline/" not in shown
    assert import_file(tmp_path / "none.py", "thing") is None


def test_code_of_a_class_is_that_of_its_file_and_of_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the folder, or a file in it, is a link; what is installed, or lies elsewhere, is none of it."""
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "below").mkdir(parents=True)
    link.symlink_to(real)
    (real / "beside_it.py").write_text("x = 1\n")
    (real / "below" / "further_down.py").write_text("y = 2\n")
    (tmp_path / "kept_elsewhere.py").write_text("z = 3\n")
    (real / "linked_file.py").symlink_to(tmp_path / "kept_elsewhere.py")
    lines = ["import beside_it, linked_file, torch", "from below import further_down", "class Mine: pass"]
    (real / "mine.py").write_text("\n".join(lines))
    for name in ("beside_it", "linked_file", "below", "below.further_down"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = import_file(link / "mine.py", "thing")
    assert module is not None
    first = code_of(module.Mine)
    assert sorted(first) == ["below/further_down.py", "beside_it.py", "mine.py"]
    (real / "beside_it.py").write_text("x = 2\n")
    changed = code_of(module.Mine)
    assert [name for name in first if first[name] != changed[name]] == ["beside_it.py"]


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
    with pytest.raises(Conflict, match="trains.py calls paceline.fit while it is imported"):
        import_file(file, "thing")
    file.write_text("import paceline\npaceline.sweep('digits', {'lr': '1:2'}, epochs=1)\n")
    with pytest.raises(Conflict, match="trains.py calls paceline.sweep while it is imported"):
        import_file(file, "thing")
    refuse_on_import("paceline.fit")  # nothing is left of it
