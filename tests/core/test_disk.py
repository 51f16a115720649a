"""Files that are complete or absent, also where the disk refuses."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.disk import CannotWrite, DiskFull, cannot_write, is_aside, is_full, replacing
from tests.train.checkpoint.test_writer import file_size_limit

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_text_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with replacing(path) as file:
        file.write("grün")
        assert not path.exists()
    assert path.read_bytes() == "grün".encode()
    assert os.listdir(tmp_path) == ["text"]


def test_bytes(tmp_path: Path) -> None:
    with replacing(tmp_path / "bytes", "wb") as file:
        file.write(b"\xff\x00")
    assert (tmp_path / "bytes").read_bytes() == b"\xff\x00"


def test_undecodable_names_pass_through(tmp_path: Path) -> None:
    with replacing(tmp_path / "names", errors="surrogateescape") as file:
        file.write("\udcff")
    assert (tmp_path / "names").read_bytes() == b"\xff"


def test_a_failure_leaves_the_file_of_before_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(str(1 // 0))
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["text"]


def test_a_disk_without_room_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("before")
    with file_size_limit(tmp_path, 100), pytest.raises(OSError, match="File too large"), replacing(path) as file:
        file.write("a" * 1000)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["text"]


def test_a_killed_writer_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("before")
    script = f"""
import os, signal
from pathlib import Path
from paceline.core.disk import replacing
with replacing(Path({str(path)!r})) as file:
    file.write("after")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert path.read_text() == "before"
    assert [is_aside(name) for name in sorted(os.listdir(tmp_path))] == [True, False]


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_permissions_are_handed_on(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "text"
    path.touch()
    path.chmod(mode)
    with replacing(path) as file:
        file.write("after")
    assert path.stat().st_mode & 0o777 == mode


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), replacing(tmp_path):
        pytest.fail("opened")


def test_which_errors_mean_a_full_disk() -> None:
    assert is_full(FULL)
    assert is_full(OSError(errno.EDQUOT, ""))
    assert not is_full(PermissionError(errno.EACCES, ""))
    assert not is_full(ValueError())


def test_a_full_disk_names_the_missing_space(tmp_path: Path) -> None:
    error = cannot_write(tmp_path / "a" / "file", FULL, 3_000_000, "it goes on where it was")
    assert isinstance(error, DiskFull)
    assert str(error).endswith("file cannot be written: No space left on device")
    assert error.hint.startswith("about 3.0 MB more are needed there, and ")
    assert error.hint.endswith(" are free: make room, and type the same command: it goes on where it was")


def test_another_failure_is_not_a_full_disk(tmp_path: Path) -> None:
    error = cannot_write(tmp_path, PermissionError(errno.EACCES, "Permission denied"), 3, "it goes on")
    assert type(error) is CannotWrite
    assert error.hint == "choose another file, in a folder that you may write to"
