"""Python files of the user: `path/to/file.py:Name` for tasks, data sets, networks and methods of one's own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TypeVar

from paceline.core.errors import Conflict, NotFound, PacelineError
from paceline.core.provenance import code_digest

T = TypeVar("T")
_PACKAGE = Path(__file__).resolve().parents[1]
_STDLIB = f"python{sys.version_info.major}.{sys.version_info.minor}"
"""Folder of Python's own modules."""


class UserFileFails(PacelineError):
    """The user's file raised; its own traceback is shown, ours is not."""

    path: Path
    error: BaseException
    doing: str
    sentence = "{path} fails while {doing}\n\n{trace}"

    @property
    def trace(self) -> str:
        error = self.error
        lines = traceback.format_exception(type(error), error, _from_file(error.__traceback__, self.path))
        return "".join(lines).rstrip()


_being_imported: list[Path] = []
"""Files of the user that are being imported, the innermost last."""


def import_file(path: Path, kind: str) -> ModuleType | None:
    """Run a user's file as a module, `kind` being part of its name; return None if it is no Python file.

    The file that is this very program is not run a second time.
    """
    program = sys.modules["__main__"]
    if path.is_file() and _file_of(program) == path.resolve():
        return program
    name = f"paceline_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers that are started afresh import it by this name
    sys.path.insert(0, str(path.parent.resolve()))
    loader = spec.loader
    with _importing(path):
        guarded(path, "it is imported", lambda: loader.exec_module(module))
    return module


@contextmanager
def _importing(path: Path) -> Iterator[None]:
    _being_imported.append(path)
    try:
        yield
    finally:
        _being_imported.pop()


def refuse_on_import(call: str) -> None:
    """Raise `Conflict` if a file of the user is being imported: `call` would train before it is asked to."""
    if _being_imported:
        raise Conflict(
            f"{_being_imported[-1]} calls {call} while it is imported",
            hint='put the call below `if __name__ == "__main__":`, so that the file can be read for what it defines',
        )


def spec_of(kind: type) -> str:
    """Return the `path/to/file.py:Name` by which a class of the user is found again; empty where there is none.

    A class that takes arguments has none, since nobody would know them; nor has one of a notebook, of a function, of
    an installed package, or of a package whose modules import each other relatively.
    """
    module = sys.modules.get(kind.__module__)
    file = _file_of(module)
    if module is None or file is None or _is_installed(file) or vars(module).get("__package__"):
        return ""
    is_found = vars(module).get(kind.__name__) is kind
    return f"{file}:{kind.__name__}" if is_found and not inspect.signature(kind).parameters else ""


def subclasses_in(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Return the subclasses of `base` that a module has, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }


def class_from_file(kind: str, spec: str, base: type[T]) -> type[T]:
    """Return the subclass of `base` that `spec` names."""
    path, _, name = spec.rpartition(":")
    module = import_file(Path(path), kind)
    if module is None:
        raise NotFound(f"there is no {kind} {spec}", hint="give it as path/to/file.py:ClassName")
    classes = subclasses_in(module, base)
    if name not in classes:
        raise NotFound(f"there is no {kind} {spec}", hint=f"there: {', '.join(sorted(classes)) or 'none'}")
    return classes[name]


def code_of(kind: type) -> dict[str, str]:
    """Return digests of the user's own code behind a class, by file: of the files that define it and its bases, and of
    loaded modules that lie beside or below them. Installed packages are none of it."""
    named = [_file_of(sys.modules.get(base.__module__)) for base in kind.__mro__]
    folders = {file.parent for file in named if file is not None and not _is_installed(file)}
    prefixes = tuple(os.path.join(folder, "") for folder in folders)
    # Thousands of modules are loaded, and a round of survivors waits for this: only files of the folders become paths.
    names = {name for module in list(sys.modules.values()) if (name := _name_of(module)) is not None}
    files = sorted(Path(real) for name in names if (real := _real(name)).startswith(prefixes))
    return {
        str(file.relative_to(folder)): code_digest([file], folder)
        for folder in folders
        for file in files
        if file.is_relative_to(folder) and not _is_installed(file)
    }


def _name_of(module: object) -> str | None:
    name = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return name if isinstance(name, str) and name.endswith(".py") else None


def _file_of(module: object) -> Path | None:
    name = _name_of(module)
    return None if name is None else Path(_real(name))


@functools.cache
def _real(name: str) -> str:
    """Return the address of a file without links."""
    folder, file = os.path.split(name)
    return os.path.realpath(name) if os.path.islink(name) else os.path.join(_real_folder(folder), file)


@functools.cache
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _is_installed(file: Path) -> bool:
    return file.is_relative_to(_PACKAGE) or not {"site-packages", "dist-packages", _STDLIB}.isdisjoint(file.parts)


def guarded(path: Path, doing: str, action: Callable[[], T]) -> T:
    """Call something in the user's file; an error that it raises is shown from that file on."""
    try:
        return action()
    except PacelineError:
        raise
    except Exception as error:
        raise UserFileFails(path, error, doing) from None


def _from_file(trace: TracebackType | None, path: Path) -> TracebackType | None:
    """Return the part of a traceback that begins in the user's file; None where it never got there (a syntax error)."""
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve() != path.resolve():
        trace = trace.tb_next
    return trace
