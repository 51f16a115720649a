"""The files of one address, through fsspec: listed, moved whole, verified and removed.

Every failure is a `StoreFailed`, whatever the library behind an address raises, and its words are free of credentials.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from paceline.core.errors import PacelineError, first_line
from paceline.core.secrets import MASK, is_secret, masked

_OBJECTS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "ocilake", "oss", "hf", "memory"))
"""Schemes whose objects appear whole or not at all, and that have no folders to make."""
_CHUNK = 8 << 20
_ASIDE = ".paceline-part"


class StoreFailed(PacelineError):
    """A store that did not do what it was asked for."""

    address: str
    doing: str
    error: BaseException
    sentence = "{address}: {doing} failed: {reason}"
    hint = "check the address, the network and the credentials, which come from the environment or from fsspec's "
    hint += "configuration (docs/cloud.md)"

    @property
    def reason(self) -> str:
        return without_secrets(first_line(self.error), os.environ)


class UploadDiffers(Exception):
    """A store that has other bytes than were sent."""


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return a text without what has the form of a secret, and without values of variables that hold one."""
    for name, value in environment.items():
        if len(value) >= 8 and is_secret(name, value):
            text = text.replace(value, MASK)
    return masked(text)


@dataclass(frozen=True)
class Entry:
    """A file in a store."""

    num_bytes: int
    version: str
    """Changes when the file does: its ETag or checksum where the store has one, else the time of the last change."""


@dataclass(frozen=True)
class Patience:
    """Number of attempts, and the pauses between them."""

    tries: int = 3
    first_pause_s: float = 0.5

    def pauses(self) -> list[float]:
        return [self.first_pause_s * 2**number for number in range(self.tries - 1)]


class Store:
    """Files below one address, by names relative to it."""

    def __init__(self, address: str, patience: Patience | None = None, sleep: Callable[[float], None] | None = None):
        self.address = address.rstrip("/")
        self._patience = patience or Patience()
        self._sleep = sleep or time.sleep
        self._scheme = address.partition("://")[0]

    def files(self, below: str = "") -> dict[str, Entry]:
        """Return all files, of a folder if one is named."""
        with self._doing(f"looking for files{f' below {below}' if below else ''}"):
            fs, root = self._open()
            folder = f"{root}/{below}".rstrip("/")
            try:
                listed = fs.find(folder, detail=True)
            except FileNotFoundError:
                return {}
            start = len(root.rstrip("/")) + 1
            names = {name[start:]: info for name, info in listed.items() if name.startswith(root.rstrip("/") + "/")}
            return {name: _entry(info) for name, info in names.items() if not name.endswith(_ASIDE)}

    def entry(self, name: str = "") -> Entry | None:
        """Return a file, None if there is none of this name; without a name, the one at the address itself."""
        with self._doing(f"looking for {name or 'it'}"):
            fs, root = self._open()
            try:
                info = fs.info(_join(root, name))
            except FileNotFoundError:
                return None
            return _entry(info) if info.get("type") == "file" else None

    def get(self, name: str, target: Path) -> Entry:
        """Bring a file to `target`, whole or not at all; raises `FileNotFoundError` where there is none."""
        entry = self.entry(name)
        if entry is None:
            raise FileNotFoundError(f"{self.address}/{name}")
        aside = target.with_name(f".{target.name}.{os.getpid()}.writing")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._again(f"reading {name or 'it'}", lambda: self._get_once(name, aside, entry))
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(aside, target)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        return entry

    def read(self, name: str, max_bytes: int = 64 * 10**6) -> bytes | None:
        """Return the content of a small file, None where there is none."""
        with self._doing(f"reading {name}"):
            fs, root = self._open()
            try:
                with fs.open(_join(root, name), "rb") as file:
                    return bytes(file.read(max_bytes))
            except FileNotFoundError:
                return None

    def put(self, source: Path, name: str) -> Entry:
        """Send a file; when it returns, the store has the same bytes, which were read again."""
        wanted = _digest(source)
        entry: Entry = self._again(f"writing {name or 'it'}", lambda: self._put_once(source, name, wanted))
        return entry

    def create(self, name: str, content: bytes) -> bool:
        """Make a small file, unless there is one; return True if it has this content, which nobody else may have.

        Of several that ask at once, one gets it where the store writes on a condition (S3, Google, Azure, ssh, memory);
        elsewhere the last one does.
        """
        with self._doing(f"writing {name}"):
            fs, root = self._open()
            place = _join(root, name)
            if self._scheme not in _OBJECTS:
                fs.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
            try:
                if self._scheme in _OBJECTS:
                    fs.pipe_file(place, content, mode="create")
                else:
                    # paramiko's own files are not writable with `x` alone.
                    is_paramiko = type(fs).__module__ == "fsspec.implementations.sftp"
                    with fs.open(place, "wxb" if is_paramiko else "xb") as file:
                        file.write(content)
            except Exception:  # it is there, or the store knows no conditions: each library has its own words
                if not fs.exists(place):
                    fs.pipe_file(place, content)
        return self.read(name) == content

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is gone already is no failure."""
        with self._doing("removing files"):
            fs, root = self._open()
            for name in names:
                with suppress(FileNotFoundError):
                    fs.rm_file(_join(root, name))

    def move(self, old: str, new: str) -> None:
        """Give a file another name."""
        with self._doing(f"renaming {old}"):
            fs, root = self._open()
            if self._scheme not in _OBJECTS:
                fs.makedirs(str(PurePosixPath(_join(root, new)).parent), exist_ok=True)
            fs.mv(_join(root, old), _join(root, new))

    # -- one attempt -----------------------------------------------------------------------------------------------

    def _get_once(self, name: str, aside: Path, entry: Entry) -> None:
        fs, root = self._open()
        with fs.open(_join(root, name), "rb", cache_type="none") as source, aside.open("wb") as target:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
        if aside.stat().st_size != entry.num_bytes:
            raise UploadDiffers(f"{aside.stat().st_size} of {entry.num_bytes} bytes came")

    def _put_once(self, source: Path, name: str, wanted: tuple[int, str]) -> Entry:
        fs, root = self._open()
        final = _join(root, name)
        written = final if self._scheme in _OBJECTS else final + _ASIDE
        if self._scheme not in _OBJECTS:
            fs.makedirs(str(PurePosixPath(final).parent), exist_ok=True)
        fs.put_file(str(source), written)
        fs.invalidate_cache(written)
        info = _entry(fs.info(written))
        if info.num_bytes != wanted[0]:
            raise UploadDiffers(f"the store has {info.num_bytes} of {wanted[0]} bytes")
        with fs.open(written, "rb", cache_type="none") as file:
            if _digest_of(iter(lambda: file.read(_CHUNK), b"")) != wanted:
                raise UploadDiffers("the store has other bytes than were sent")
        if written != final:
            with suppress(FileNotFoundError):
                fs.rm_file(final)
            fs.mv(written, final)
            info = _entry(fs.info(final))
        return info

    def _again(self, doing: str, once: Callable[[], Any]) -> Any:
        for pause_s in self._patience.pauses():
            try:
                return once()
            except Exception:  # whatever a library raises for a network
                self._sleep(pause_s)
        with self._doing(doing):
            return once()

    def _open(self) -> tuple[Any, str]:
        import fsspec

        # Made anew in a process that was forked, otherwise the same: fsspec keeps one per scheme and process.
        # Stores of objects remember listings; what others are given goes to their connection, which knows no such word.
        options = {"use_listings_cache": False} if self._scheme in _OBJECTS else {}
        fs, root = fsspec.core.url_to_fs(self.address, **options)
        fs.invalidate_cache()
        return fs, str(root)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (PacelineError, KeyboardInterrupt):
            raise
        except Exception as error:  # each library behind fsspec has its own
            raise StoreFailed(self.address, what, error) from None


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}" if name else root


def _entry(info: Mapping[str, Any]) -> Entry:
    version = next((info[key] for key in ("ETag", "etag", "md5Hash", "sha256", "blob_id") if info.get(key)), None)
    if version is None:
        version = next(
            (info[key] for key in ("mtime", "LastModified", "last_modified", "created") if info.get(key)), ""
        )
    if isinstance(version, datetime):  # the same moment may come as a number elsewhere
        version = version.timestamp()
    return Entry(int(info.get("size") or 0), str(version))


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return _digest_of(iter(lambda: file.read(_CHUNK), b""))


def _digest_of(chunks: Iterator[bytes]) -> tuple[int, str]:
    num_bytes, digest = 0, xxhash.xxh3_128()
    for chunk in chunks:
        digest.update(chunk)
        num_bytes += len(chunk)
    return num_bytes, digest.hexdigest()
