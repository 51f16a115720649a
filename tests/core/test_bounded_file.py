"""Files of others: bounded, and never a pipe that is waited for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paceline.core.bounded_file import open_text, read_bytes, read_text
from paceline.core.json_text import parse_json, read_json


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"ab\r\nc")
    assert read_bytes(file, 5) == b"ab\r\nc"
    assert read_text(file, 5) == "ab\nc"
    with pytest.raises(OSError, match="larger than 4 B") as caught:
        read_bytes(file, 4)
    assert caught.value.errno == errno.EFBIG


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (open_text, read_json):
        with pytest.raises(OSError, match="a pipe or a device, not a file"):
            read(tmp_path / "pipe")
        with pytest.raises(OSError, match="a pipe or a device, not a file"):
            read(Path("/dev/zero"))
        with pytest.raises(IsADirectoryError):
            read(tmp_path)
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "absent")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", "{", b"\xff\xfe\x00", "\ud800x"])
def test_json_is_a_value_or_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="."):
        parse_json(text)
