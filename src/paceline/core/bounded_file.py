"""Reading of files that others wrote: at most so many bytes, and no device or pipe that never ends.

A refusal is an `OSError` with its words in `strerror`, so that callers say it as they say "Permission denied".
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from paceline.core.units import size


def read_bytes(path: Path, max_bytes: int, *, is_any_kind: bool = False) -> bytes:
    """Return the content of a file of at most `max_bytes`.

    Args:
        path: The file.
        max_bytes: Limit of its size; the rest of a larger one is not read.
        is_any_kind: Read pipes too, as in `--config <(make-config)`. Opening one waits for its writer, so only
            what the user typed may be one.
    """
    # Without O_NONBLOCK a pipe in place of a file would be waited for before it can be refused.
    with open(os.open(path, os.O_RDONLY | (0 if is_any_kind else os.O_NONBLOCK)), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not is_any_kind and not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {size(max_bytes)}", str(path))
    return content


def read_text(path: Path, max_bytes: int, *, is_any_kind: bool = False) -> str:
    """Return the UTF-8 text of a file of at most `max_bytes`; raises `UnicodeDecodeError`, or `OSError`."""
    text = read_bytes(path, max_bytes, is_any_kind=is_any_kind).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
