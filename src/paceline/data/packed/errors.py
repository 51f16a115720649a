"""Names of packed files, and what can be wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.paths import near

PACKED = (".h5", ".hdf5", ".hdf")
"""Endings of the names of packed files."""
_PACK_AGAIN = "pack it again: `paceline pack IN... OUT.h5`; `paceline pack --verify FILE` checks every byte of a file"


def is_packed(path: Path | str) -> bool:
    """Return True if the name of a file says that it is packed data."""
    return str(path).lower().endswith(PACKED)


class PackedUnreadable(PacelineError):
    """A file that does not hold the packed data it should."""

    path: Path
    why: str
    advice: str | None = None
    sentence = "{place}: {why}"
    hint = "{next_step}"

    @property
    def place(self) -> str:
        return near(self.path)

    @property
    def next_step(self) -> str:
        return _PACK_AGAIN if self.advice is None else self.advice


class PackedMisfit(PacelineError):
    """Packed data that is intact, but not of the kind that is needed."""

    path: Path
    why: str
    advice: str
    sentence = "{place}: {why}"
    hint = "{advice}"

    @property
    def place(self) -> str:
        return near(self.path)


class PackageMissing(PacelineError):
    """h5py, which packed data needs, is not installed with Paceline itself."""

    sentence = "packed data needs the package h5py, which is not installed"
    hint = "pip install 'paceline[pack]'"


class NoSuchStream(PacelineError):
    """A stream that a data set does not have."""

    name: str
    available: Sequence[str]
    sentence = "there is no stream {name!r}"
    hint = "there are: {names}"

    @property
    def names(self) -> str:
        return ", ".join(self.available)
