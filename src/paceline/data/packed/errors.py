"""What can be wrong with packed data, each as an exception that says what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.paths import near

PACKED = (".h5", ".hdf5", ".hdf")
"""How the names of packed files end."""


def is_packed(path: Path | str) -> bool:
    """Whether a path is meant as packed data, by its name."""
    return str(path).lower().endswith(PACKED)


class PackedUnreadable(PacelineError):
    """A file that does not hold the packed data it should."""

    hint = "pack it again: `paceline pack IN... OUT.h5`; `paceline pack --verify FILE` checks every byte of a file"

    def __init__(self, path: Path, why: str, hint: str | None = None) -> None:
        super().__init__(f"{near(path)}: {why}")
        self.path, self.why = path, why
        if hint is not None:
            self.hint = hint


class PackedMisfit(PacelineError):
    """Packed data that is sound, and not what is needed here."""

    def __init__(self, path: Path, why: str, hint: str) -> None:
        super().__init__(f"{near(path)}: {why}")
        self.path, self.why, self.hint = path, why, hint


class PackageMissing(PacelineError):
    """Packed data needs h5py, which is not installed with Paceline itself."""

    hint = "pip install 'paceline[pack]'"

    def __init__(self) -> None:
        super().__init__("packed data needs the package h5py, which is not installed")


class NoSuchStream(PacelineError):
    """A stream that a data set does not have."""

    def __init__(self, name: str, there: Sequence[str]) -> None:
        super().__init__(f"there is no stream {name!r}")
        self.name = name
        self.hint = f"there are: {', '.join(there)}"
