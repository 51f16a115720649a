"""Files of data at addresses, brought here when they are needed; files and folders of ours, sent there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.cloud.address import address_of, copies_root
from paceline.core.cloud.store import Entry, Store
from paceline.core.disk import CannotWrite, is_aside, replacing


def bring(path: Path) -> None:
    """Bring the file that `path` is the copy of, if it is one and is not here as it is there.

    Of several processes one brings it and the others wait. Where the store has no such file, none is made; a copy of
    one that was there and is gone is removed, and one that was never sent stays.
    """
    address = address_of(path)
    if address is None:
        return
    store = Store(address)
    with alone(path):
        entry = store.entry()
        if entry is None:
            if _read_note(path) is not None:
                path.unlink(missing_ok=True)
            return
        if path.is_file() and _read_note(path) == entry:
            return
        with suppress(FileNotFoundError):  # removed meanwhile
            _write_note(path, store.get("", path))


def bring_missing(path: Path) -> bool:
    """Bring a file that is not here, and is not looked for again once it is; return True if it is here now."""
    address = address_of(path)
    if address is None:
        return False
    with alone(path):
        if not path.is_file():
            with suppress(FileNotFoundError):
                Store(address).get("", path)
    return path.is_file()


def bring_parts(folder: Path, names: Sequence[str]) -> None:
    """Bring those files of a folder, which never change, that are not here; what the store has not, stays missing."""
    if all((folder / name).exists() for name in names):
        return
    address = address_of(folder)
    if address is None:
        return
    store = Store(address)
    with alone(folder):
        for name in names:
            if not (folder / name).exists():
                with suppress(FileNotFoundError):
                    store.get(name, folder / name)


def bring_folder(path: Path) -> None:
    """Bring all files below the address that `path` is the copy of, or the one at it."""
    address = address_of(path)
    if address is None:
        return
    names = Store(address).files()
    if not names:
        bring(path)
    for name in names:
        bring(path / name)


def exists(path: Path) -> bool:
    """Return True if there is something at `path`, or at the address that it is the copy of."""
    address = address_of(path)
    if address is None:
        return os.path.exists(path)  # False for a name that no file system has, which is said elsewhere
    store = Store(address)
    return store.entry() is not None or bool(store.files())


def send(path: Path) -> None:
    """Send a file, or all files of a folder, to the address that its path is the copy of, if it is one."""
    address = address_of(path)
    if address is None:
        return
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    store = Store(address)
    for file in files:
        if not is_aside(file.name):
            _write_note(file, store.put(file, "" if file == path else file.relative_to(path).as_posix()))


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes of this machine from moving the same file or folder."""
    folder = copies_root() / ".locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        advice = "what is at an address has a copy there: name a folder that you may write to in `PACELINE_COPIES`"
        raise CannotWrite(copies_root(), error, advice) from error
    with (folder / hashlib.sha256(str(path).encode()).hexdigest()[:24]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing alone would not do: a loader worker that was forked meanwhile has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


def _note(path: Path) -> Path:
    return copies_root() / ".notes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"


def _read_note(path: Path) -> Entry | None:
    """Return what the store had when the file was moved, if the copy has not changed since."""
    try:
        note = json.loads(_note(path).read_bytes())
        is_same = note["mtime"] == path.stat().st_mtime_ns and note["bytes"] == path.stat().st_size
        return Entry(note["bytes"], note["version"]) if is_same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_note(path: Path, entry: Entry) -> None:
    note = _note(path)
    note.parent.mkdir(parents=True, exist_ok=True)
    with replacing(note) as file:
        json.dump({"bytes": entry.num_bytes, "version": entry.version, "mtime": path.stat().st_mtime_ns}, file)
