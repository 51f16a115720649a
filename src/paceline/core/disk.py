"""What has been written, safe on the disk: a file that gets its name before its content is there may be empty later."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return when the content of a file is on the disk, or the entries of a folder, which syncing files is not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
