"""Paths that a run keeps: in full, so that they lead to one place from any folder, and shown as short as can be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def absolute(path: Path) -> Path:
    """In full, as seen from the working folder; links stay what they are."""
    return Path(os.path.abspath(os.path.expanduser(path)))


AbsolutePath = Annotated[Path, AfterValidator(absolute)]


def near(path: Path | str) -> str:
    """As somebody in the working folder would type it: without that folder where it lies in it."""
    return str(path).removeprefix(os.path.join(os.getcwd(), ""))
