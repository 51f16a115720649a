"""Reading of files that others wrote: at most so many bytes, and no device or pipe that never ends.

A refusal is an `OSError` with its words in `strerror`, so that callers say it as they say "Permission denied".
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import IO

from paceline.core.units import size


def open_bytes(path: Path, *, is_any_kind: bool = False) -> IO[bytes]:
    """Open a file for reading.

    Args:
        path: The file.
        is_any_kind: Open pipes too, as in `--config <(make-config)`. That waits for their writer, so only what the user
            typed may be one.
    """
    # Without O_NONBLOCK a pipe in place of a file would be waited for before it can be refused.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_any_kind else os.O_NONBLOCK))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode) or not (is_any_kind or stat.S_ISREG(mode)):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return open(descriptor, "rb")


def open_text(path: Path) -> IO[str]:
    """Open a text file for reading; bytes that are no UTF-8 become marks of that."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8", errors="replace")


def read_bytes(path: Path, max_bytes: int, *, is_any_kind: bool = False) -> bytes:
    """Return the content of a file of at most `max_bytes`; the rest of a larger one is not read."""
    with open_bytes(path, is_any_kind=is_any_kind) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {size(max_bytes)}", str(path))
    return content


def read_text(path: Path, max_bytes: int, *, is_any_kind: bool = False) -> str:
    """Return the UTF-8 text of a file of at most `max_bytes`; raises `UnicodeDecodeError`, or `OSError`."""
    text = read_bytes(path, max_bytes, is_any_kind=is_any_kind).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
