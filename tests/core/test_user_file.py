"""Users' files: a class by its address, and an error shown from the user's file on."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.user_file import NoSuchClass, UserFileFails, class_from_file, import_file


class Base:
    """What a user's class subclasses."""


def test_a_class_is_found_by_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.core.test_user_file import Base\nclass Mine(Base): pass\nclass Other: pass\n")
    assert class_from_file("thing", f"{file}:Mine", Base).__name__ == "Mine"
    with pytest.raises(NoSuchClass, match="there is no thing") as error:
        class_from_file("thing", f"{file}:Other", Base)
    assert error.value.hint == "there: Mine"
    with pytest.raises(NoSuchClass) as error:
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
