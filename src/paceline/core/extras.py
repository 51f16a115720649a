"""Packages that come with an extra of ours, and the message where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.errors import PacelineError

EXTRAS = {
    **dict.fromkeys(("soundfile", "soxr", "rapidfuzz"), "asr"),
    **dict.fromkeys(("sklearn", "espeakng_loader"), "demo"),
    **dict.fromkeys(("tokenizers", "sacrebleu"), "translation"),
    "h5py": "pack",
    "plotly": "report",
    "fsspec": "cloud",
    "cloudpickle": "notebook",
    "ray": "ray",
    **dict.fromkeys(("optuna", "scipy"), "lab"),
}
"""Package that a part of Paceline imports -> our extra that installs it."""


class PackagesMissing(PacelineError):
    """A recipe that needs packages which are not installed with Paceline itself."""

    recipe: str
    package: str
    extra: str
    sentence = "the recipe {recipe!r} needs the package {package}, which is not installed"
    hint = "pip install 'paceline[{extra}]'"


class CommandNeedsPackages(PacelineError):
    """A command that needs packages which are not installed with Paceline itself."""

    command: str
    package: str
    extra: str
    sentence = "`paceline {command}` needs the package {package}, which is not installed"
    hint = "pip install 'paceline[{extra}]'"


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return the package of one of our extras that an import did not find; None if it is a bug of somebody."""
    package = (error.name or "").partition(".")[0]
    return package if package in EXTRAS else None


@contextmanager
def imports_for(recipe: str) -> Iterator[None]:
    """Name the extra where an import inside fails because it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = missing_package(error)
        if package is None:
            raise
        raise PackagesMissing(recipe, package, EXTRAS[package]) from None
