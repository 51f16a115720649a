"""A class in a user's file: `path/to/file.py:Name`, for networks and methods of one's own."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError


class NoSuchClass(PacelineError):
    """A file without the class that was named, or no file."""

    def __init__(self, what: str, spec: str, found: list[str] | None) -> None:
        super().__init__(f"there is no {what} {spec}")
        self.hint = "give it as path/to/file.py:ClassName" if found is None else f"there: {', '.join(found) or 'none'}"


class OwnFileFails(PacelineError):
    """The user's file raised while it was imported."""

    def __init__(self, path: Path, error: Exception) -> None:
        lines = traceback.format_exception_only(error)
        super().__init__(f"{path} fails while it is imported\n\n{''.join(lines).rstrip()}")


def class_from_file(what: str, spec: str, base: type) -> Any:
    """The class that `spec` means, a subclass of `base`."""
    path, _, name = spec.rpartition(":")
    file = Path(path)
    found = importlib.util.spec_from_file_location(f"paceline_{what}_{file.stem}", file) if file.is_file() else None
    if found is None or found.loader is None:
        raise NoSuchClass(what, spec, None)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    try:
        found.loader.exec_module(module)
    except PacelineError:
        raise
    except Exception as error:
        raise OwnFileFails(file, error) from error
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    if name not in classes:
        raise NoSuchClass(what, spec, sorted(classes))
    return classes[name]
