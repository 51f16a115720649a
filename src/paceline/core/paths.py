"""Paths in a run's record are absolute; paths in messages are relative to the working folder where possible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from paceline.core.cloud.address import is_address, shown


def absolute(path: Path) -> Path:
    """Return an absolute path; `~` is expanded, links are kept. An address is none, and stays as it is."""
    return path if is_address(path) else Path(os.path.abspath(os.path.expanduser(path)))


AbsolutePath = Annotated[Path, AfterValidator(absolute)]


def near(path: Path | str) -> str:
    """Return a path as typed in the working folder: relative if it lies in it, the address if it is the copy of one."""
    return shown(path).removeprefix(os.path.join(os.getcwd(), ""))
