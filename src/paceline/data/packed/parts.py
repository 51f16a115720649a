"""State of an unfinished packing: pieces and shards in a folder beside the packed file, and the lock on it.

Shards get names beside the packed file when all of them are whole. A token of the packing is in these names: they
clash with no other file, and the packed file that is replaced stays readable until the new one has its name.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.disk import is_aside, replacing, sync
from paceline.core.errors import AlreadyExists, Busy
from paceline.core.paths import near
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import PackedFile, Shards
from paceline.data.packed.reader import read_layout

LOCK = "lock"
"""File in the folder that names the process which holds it."""
_PLAN = "plan.json"
"""Name of the packing and, each in a line, the files that it replaces."""


class Parts:
    """Folder of one packing."""

    def __init__(self, out: Path, folder: Path, pack: str, replaced: Iterable[Path]) -> None:
        self.pack = pack
        """Name of the packing, which its shards bear."""
        self._out, self._folder, self._replaced = out, folder, frozenset(replaced)

    def piece(self, number: int) -> Path:
        return self._folder / f"{number:06d}.npz"

    def shard(self, number: int) -> Path:
        """Return the path of a shard until all are written."""
        return self._folder / f"{number:05d}{self._out.suffix}"

    def named_shard(self, number: int) -> Path:
        """Return the final path of a shard: `train-5c3f09ab-00003.h5` beside `train.h5`."""
        return self._out.with_name(f"{self._out.stem}-{_token(self.pack)}-{number:05d}{self._out.suffix}")

    def find_shard(self, number: int) -> Path:
        """Return the present path of a shard: a kill may have come when some had their final names."""
        named = self.named_shard(number)
        return self.shard(number) if self.shard(number).exists() or not named.exists() else named

    def name_shards(self, number: int) -> list[Path]:
        """Give all shards their final names."""
        paths = [self.named_shard(shard) for shard in range(number)]
        for shard, path in enumerate(paths):
            if self.find_shard(shard) != path:
                self.shard(shard).replace(path)
        sync(self._out.parent)
        return paths

    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes (of pieces, of shards) that are on the disk so far."""
        shards = [*self._folder.glob(f"*{self._out.suffix}"), *_shards_named(self._out, self.pack)]
        pieces = self._folder.glob("*.npz")
        return sum(path.stat().st_size for path in pieces), sum(path.stat().st_size for path in shards)

    def finish(self, files: Sequence[Path]) -> None:
        """Remove all parts, and what was replaced: the packed file has its name."""
        for path in {*self._replaced, *_shards_named(self._out, self.pack)} - set(files):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder)


def open_parts(out: Path, identity: str, force: bool) -> Parts:
    """Open the folder, which is locked, for parts of this packing and of no other."""
    folder = parts_folder(out)
    replaced = set(_shards_of(out))
    pack, *names = _read_plan(folder)
    planned = {out.with_name(name) for name in names}
    if pack.startswith(identity):
        return Parts(out, folder, pack, replaced | planned)
    leftovers = [path for path in folder.iterdir() if path.name not in (_PLAN, LOCK)]
    if not force and (pack or not all(is_aside(path.name) for path in leftovers)):
        raise AlreadyExists(
            f"{near(folder)} holds parts of an unfinished packing of different data, code or options",
            hint="give the same inputs and options to continue it; `--force` starts again",
        )
    if pack:
        # A kill may have come when shards had their names: no file names them, unless `out` does.
        replaced |= planned | set(_shards_named(out, pack))
    for path in leftovers:  # before the plan, which they must not seem to belong to
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    pack = _unused_name(out, identity)
    with replacing(folder / _PLAN) as file:
        file.write("\n".join([pack, *sorted(path.name for path in replaced)]))
    return Parts(out, folder, pack, replaced)


def parts_folder(out: Path) -> Path:
    """Return the folder of a packing's parts: `train.h5.parts`."""
    return out.with_name(f"{out.name}.parts")


@contextmanager
def locked(out: Path, folder: Path) -> Iterator[None]:
    """Hold the lock on the folder of the parts of `out`, which is made if it is missing."""
    descriptor = _lock(out, folder)
    _held.add(descriptor)
    try:
        yield
    finally:
        try:
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()  # if it is empty
        finally:
            _held.discard(descriptor)
            os.close(descriptor)


def _lock(out: Path, folder: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # the process that held it has just removed the folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace").strip()
            os.close(descriptor)
            raise Busy(
                f"{near(out)} is being written by another `paceline pack`: {owner or 'one that has just started'}",
                hint="wait for it or stop it, or name another file",
            ) from None
        except OSError:
            return descriptor  # a file system without locks: nothing can be promised there
        if _is_at(folder / LOCK, descriptor):
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            with suppress(OSError):  # a full disk: the lock holds, even if it does not name its owner
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
            return descriptor
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return True if an open file still has this name: the process that held it before may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_held: set[int] = set()


def _release() -> None:
    """Close locks in a forked process, which would otherwise hold them for as long as it outlives its parent."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release)


def _read_plan(folder: Path) -> list[str]:
    plan = folder / _PLAN
    return (plan.read_text().splitlines() if plan.exists() else []) or [""]


def _unused_name(out: Path, identity: str) -> str:
    """Return a new name for a packing of this identity: packed again, data may differ, and names must be free."""
    while _shards_named(out, name := f"{identity}-{secrets.token_hex(4)}"):
        pass
    return name


def _token(pack: str) -> str:
    return pack.rpartition("-")[2]


def _shards_named(out: Path, pack: str) -> list[Path]:
    """Return the files whose names are those of this packing's shards."""
    begin = f"{out.stem}-{_token(pack)}-"
    return [path for path in out.parent.iterdir() if path.name.startswith(begin) and path.suffix == out.suffix]


def _shards_of(out: Path) -> list[Path]:
    """Return the shards of the packed file that is to be replaced; a file that only bears such a name is left alone."""
    file = _layout_of(out)
    if not isinstance(file, Shards):
        return []
    return [path for path in file.files if _token(file.pack) in path.name or _is_of(path, file.pack)]


def _is_of(path: Path, pack: str) -> bool:
    file = _layout_of(path)
    return isinstance(file, PackedFile) and file.packing is not None and file.packing.pack == pack


def _layout_of(path: Path) -> PackedFile | Shards | None:
    try:
        return read_layout(path) if path.exists() else None
    except PackedUnreadable:
        return None
