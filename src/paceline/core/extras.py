"""Packages that an extra of ours installs, and the message where one is missing."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata

from paceline.core.errors import PacelineError

_DEVELOPMENT = ("test", "docs", "ports", "bench", "returnn", "cloud-test")
"""Extras that only developers of Paceline install."""
_IMPORTED_AS = {"scikit_learn": "sklearn", "mlflow_skinny": "mlflow"}
"""Packages whose import has another name."""


@functools.cache
def extras() -> Mapping[str, frozenset[str]]:
    """Return the packages of each extra as they are imported, from the metadata of the distribution."""
    direct: dict[str, set[str]] = {}
    nested: dict[str, set[str]] = {}
    for line in metadata.requires("paceline") or ():
        requirement, _, marker = line.partition(";")
        found = re.search(r"""extra == ["']([\w-]+)""", marker)
        name = re.match(r"[\w.-]+", requirement)
        if found is None or name is None or found[1] in _DEVELOPMENT:
            continue
        package = re.sub(r"[-_.]+", "_", name[0]).lower()
        if package == "paceline":
            nested.setdefault(found[1], set()).update(re.findall(r"[\w-]+", requirement[len(name[0]) :]))
        else:
            direct.setdefault(found[1], set()).add(_IMPORTED_AS.get(package, package))
    names = direct.keys() | nested.keys()
    return {
        name: frozenset(direct.get(name, ())).union(*(direct.get(each, ()) for each in nested.get(name, ())))
        for name in names
    }


def extra_of(package: str, wanted: str = "") -> str | None:
    """Return the extra that installs a package: `wanted` if it does, else the smallest; None if no extra does."""
    having = [name for name, packages in extras().items() if package in packages]
    if wanted in having:
        return wanted
    return min(having, key=lambda name: (len(extras()[name]), name), default=None)


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


def missing_package(error: ModuleNotFoundError, wanted: str = "") -> tuple[str, str] | None:
    """Return the package that an import did not find and its extra; None if it is not a package of an extra."""
    package = (error.name or "").partition(".")[0]
    extra = extra_of(package, wanted)
    return None if extra is None else (package, extra)


@contextmanager
def imports_for(recipe: str) -> Iterator[None]:
    """Name the extra where an import inside fails because it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = missing_package(error, recipe)
        if missing is None:
            raise
        raise PackagesMissing(recipe, *missing) from None
