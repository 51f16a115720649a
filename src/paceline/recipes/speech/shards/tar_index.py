"""Places of the members of a tar file: found once by walking over its headers, and kept in a cache.

A member is then read as fast as a file, in any order. A member has a path below its tar file, as if that were a folder:
`audio_0.tar/one.flac`.
"""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.cloud.address import copies_root
from paceline.core.cloud.file_copy import alone, bring_missing
from paceline.core.disk import CannotWrite, replacing
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.units import counted
from paceline.data.strings import Strings

SUFFIX = ".tar"
_BLOCK = tarfile.BLOCKSIZE
_VERSION = 3
"""Of the files in the cache."""
_INDEXES_HELD = 4096


class ShardUnreadable(PacelineError):
    """A tar file that cannot be read, or not to its end."""

    path: Path
    why: str
    advice: str = "name tar files that are there and whole, such as `shard-{0..7}.tar`"
    sentence = "{place}: {why}"
    hint = "{advice}"

    @property
    def place(self) -> str:
        return near(self.path)


class Member(NamedTuple):
    """Bytes of a tar file that are a file."""

    offset: int
    size: int


class TarIndex:
    """Members of a tar file by name, in their order; arrays instead of an object per member."""

    def __init__(self, names: Strings, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self.names, self._offsets, self._sizes = names, offsets, sizes
        hashes = np.fromiter((_hash(names[row]) for row in range(len(names))), np.uint64, len(names))
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def __len__(self) -> int:
        return len(self.names)

    def find(self, name: str) -> Member | None:
        """Return the last member of this name, which is the one that tar means."""
        found = np.searchsorted(self._hashes, np.uint64(_hash(name)), side="right") - 1
        while found >= 0 and self._hashes[found] == _hash(name):
            row = int(self._order[found])
            if self.names[row] == name:
                return self.member(row)
            found -= 1
        return None

    def member(self, row: int) -> Member:
        return Member(int(self._offsets[row]), int(self._sizes[row]))

    def rows(self) -> Iterator[tuple[str, Member]]:
        """Yield names and places, in the order of the file."""
        for row in range(len(self)):
            yield self.names[row], self.member(row)

    @cached_property
    def by_stem(self) -> dict[str, str]:
        """Members by the name without folder and suffix, as NeMo looks for them."""
        return {PurePosixPath(name).stem: name for name, _ in self.rows()}


def tar_index(path: Path) -> TarIndex:
    """Return the members of a tar file, from the cache if it has not changed; all of it was walked over then."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not bring_missing(path):
            raise ShardUnreadable(path, "there is no such shard") from None
        status = os.stat(path)
    except OSError as error:
        raise ShardUnreadable(path, f"cannot be read: {error.strerror}") from None
    return _index(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=_INDEXES_HELD)
def _index(path: str, size: int, changed_ns: int) -> TarIndex:
    cached = cache_path(Path(path), ".npz")
    index = _read_cached(cached)
    if index is None:
        with alone(cached):  # of several ranks one walks, the others wait
            index = _read_cached(cached)
            if index is None:
                index = _walk(Path(path), size)
                _write_cached(cached, index)
    return index


def cache_path(path: Path, suffix: str) -> Path:
    """Return the file that keeps what is known of a tar file as it is now."""
    status = os.stat(path)
    stamp = f"{_VERSION}\0{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}"
    return copies_root() / ".shards" / f"{xxhash.xxh3_128_hexdigest(stamp.encode('utf-8', 'surrogateescape'))}{suffix}"


def split_member(path: Path) -> tuple[Path, str] | None:
    """Return the tar file and the name of a path inside of one; None for any other path."""
    text = str(path)
    at = text.find(SUFFIX + "/")
    while at >= 0:
        shard = Path(text[: at + len(SUFFIX)])
        if shard.is_file() or bring_missing(shard):
            return shard, text[at + len(SUFFIX) + 1 :]
        at = text.find(SUFFIX + "/", at + 1)
    return None


def open_member(shard: Path, member: Member) -> io.BufferedReader:
    """Return a member as an open file."""
    return io.BufferedReader(_Window(os.open(shard, os.O_RDONLY | os.O_CLOEXEC), member), 1 << 16)


def failure_of(file: io.BufferedReader) -> OSError | None:
    """Return why a member could not be read on, for callers that have lost the exception."""
    return file.raw.failure if isinstance(file.raw, _Window) else None


class _Window(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, descriptor: int, member: Member) -> None:
        self._descriptor, self._member, self._at = descriptor, member, 0
        self.failure: OSError | None = None

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._member.size - self._at)
        if wanted <= 0:
            return 0
        try:
            data = os.pread(self._descriptor, wanted, self._member.offset + self._at)
        except OSError as error:
            self.failure = error
            raise
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._member.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _walk(path: Path, size: int) -> TarIndex:
    names: list[bytes] = []
    places: list[Member] = []
    end = 0
    try:
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                advice = f"unpack it: `gunzip {near(path)}`: members are read in any order"
                raise ShardUnreadable(path, "is compressed", advice)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (info := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
                    end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                    if info.isreg():
                        names.append(_inside(path, info.name).encode("utf-8", "surrogateescape"))
                        places.append(Member(info.offset_data, info.size))
            file.seek(end)
            is_whole = file.read(_BLOCK) == bytes(_BLOCK) and end <= size
    except tarfile.ReadError as error:
        if not size or ("truncated" not in str(error) and "unexpected end" not in str(error)):
            raise ShardUnreadable(path, "is no tar file: {why}".format(why=str(error) if size else "empty")) from None
        is_whole = False
    except OSError as error:
        raise ShardUnreadable(path, f"cannot be read: {error.strerror}") from None
    if not is_whole:
        last = names[-1].decode("utf-8", "backslashreplace") if names else "nothing"
        why = f"is truncated: it ends after {size:,} bytes, within or behind {last} ({counted(len(names), 'member')})"
        raise ShardUnreadable(path, why, "copy it again from where it was made")
    offsets, sizes = (np.array([place[part] for place in places], np.int64) for part in (0, 1))
    return TarIndex(Strings.pack(names), offsets, sizes)


def _inside(path: Path, name: str) -> str:
    """Return the name of a member as a path below its tar file: without a leading /, which tar drops, too."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        advice = "write it anew, with names that do not lead out of it"
        raise ShardUnreadable(path, f"has a member {name!r}, which is no file in it", advice)
    return "/".join(parts)


def _read_cached(path: Path) -> TarIndex | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            starts = np.zeros(len(stored["lengths"]) + 1, np.int64)
            np.cumsum(stored["lengths"], out=starts[1:])
            return TarIndex(Strings(stored["names"], starts), stored["offsets"], stored["sizes"])
    except (OSError, ValueError, LookupError, TypeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return None  # not there yet, or damaged: it is made again


def _write_cached(path: Path, index: TarIndex) -> None:
    names = index.names
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            np.savez(file, names=names.packed, lengths=names.lengths, offsets=index._offsets, sizes=index._sizes)
    except OSError as error:
        advice = "what is known of shards is kept there: name a folder that you may write to in `PACELINE_COPIES`"
        raise CannotWrite(path, error, advice) from error


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))
