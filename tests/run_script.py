"""`python FILE WORDS`, for `tests.forked.Forked`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> int:
    """Run the script that the first word names, with the others as its words; return its exit code."""
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0
