"""What a packed file holds, and where: read once with h5py, so that the data itself can be mapped into memory.

All sequences of a stream lie one after the other in one contiguous data set. Our own files keep an index of them in the
group `paceline`, whatever the names of the data sets are (`layout`: our own, or RETURNN's). A file without that group
is read as RETURNN's `HDFDataset` would read it (`hdf_returnn.py`). A file of shards holds nothing but their names.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.paths import near
from paceline.data.packed.errors import PackageMissing, PackedUnreadable
from paceline.data.strings import Strings

VERSION = 1
OURS = "paceline"
"""The group that makes a file ours."""
Layout = Literal["paceline", "returnn"]
Kind = Literal["audio", "text", "features", "values", "int", "float", "bool"]
"""What a stream means: `text` is UTF-8; the last three are single Python numbers."""
SINGLE = ("int", "float", "bool")
_MAGIC = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True)
class StreamPlace:
    """Where a file holds a stream: row `n` is steps `starts[n]` to `starts[n + 1]`."""

    dataset: str
    """Its name in the file."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of one step, as users get it."""
    starts: NDArray[np.int64]
    offset: int | None
    """Bytes from the beginning of the file; None where the data set is in chunks, and is read with h5py."""
    kind: Kind = "values"
    is_single: bool = False
    """Every row is one step, and users get it without its first axis."""
    blocks: NDArray[np.int64] | None = None
    """The rows with which blocks begin, and the number of rows."""
    digests: NDArray[np.uint64] | None = None
    """XXH3 of each block."""

    @property
    def step_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.step_bytes * int(self.starts[-1])


@dataclass(frozen=True)
class PackedFile:
    """One file, without its data."""

    path: Path
    stamp: tuple[int, int]
    """Size and time of change, when it was read."""
    layout: Layout
    streams: Mapping[str, StreamPlace]
    tags: Strings
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """One number per row: `lengths` (of audio in seconds), `counts`."""
    about: Mapping[str, Any] = field(default_factory=dict)
    extras: Strings | None = None
    """Of each row what its line in a manifest said beside what we know, as JSON."""

    def __len__(self) -> int:
        return len(self.tags)


@dataclass(frozen=True)
class Shards:
    """A file that stands for others."""

    path: Path
    files: Sequence[Path]
    num_rows: Sequence[int]
    pack: str
    skipped: Sequence[str] = ()
    """Why rows behind those of the last shard were left out; of others their shards tell."""


def stamp_of(path: Path) -> tuple[int, int]:
    """By which a file is known to be the same."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def h5py_or_error() -> Any:
    """h5py, which is not installed with Paceline itself."""
    try:
        import h5py
    except ModuleNotFoundError:
        raise PackageMissing from None
    return h5py


def read_layout(path: Path) -> PackedFile | Shards:
    """What is in a file; raises `PackedUnreadable` for one that is cut short, damaged, or something else."""
    h5py = h5py_or_error()
    _refuse_other_things(path)
    try:
        stamp = stamp_of(path)
        with h5py.File(path, "r") as file:
            if OURS in file:
                return _read_ours(path, stamp, file)
            from paceline.data.packed.returnn import read_returnn

            return read_returnn(path, stamp, file)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        # h5py's words for a file that is cut short: "truncated file: eof = 2048, sblock->base_addr = 0, ...".
        what = str(error.args[0] if error.args else error)
        raise PackedUnreadable(path, _why(what)) from None


def index_digest(about: str, arrays: Sequence[NDArray[Any]]) -> str:
    """Of all that a file says of its data."""
    digest = xxhash.xxh3_64(about.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def index_arrays(
    streams: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]],
    tags: Strings,
    columns: Mapping[str, NDArray[Any]],
) -> list[NDArray[Any]]:
    """What `index_digest` is of, in its order; of each stream starts, blocks and digests."""
    return [array for each in streams for array in each] + [
        tags.packed,
        tags.lengths,
        *(columns[name] for name in sorted(columns)),
    ]


def offset_of(dataset: Any) -> int | None:
    """Where in the file a contiguous data set begins; None for one in chunks."""
    if dataset.size == 0:
        return 0
    offset: int | None = dataset.id.get_offset() if dataset.chunks is None else None
    return offset


def _read_ours(path: Path, stamp: tuple[int, int], file: Any) -> PackedFile | Shards:
    ours = file[OURS]
    written = str(ours.attrs["about"])
    about = json.loads(written)
    if about["version"] != VERSION:
        hint = "use the Paceline that packed it, or pack it again with this one"
        raise PackedUnreadable(path, f"is of version {about['version']}, and this is {VERSION}", hint)
    if "shards" in about:
        if index_digest(written, []) != ours.attrs["digest"]:
            raise PackedUnreadable(path, "is damaged: what it says of its shards has been changed")
        files = [path.with_name(each["name"]) for each in about["shards"]]
        num_rows = [each["num_rows"] for each in about["shards"]]
        return Shards(path, files, num_rows, about["pack"], about.get("skipped", ()))
    starts = {name: ours[f"starts/{name}"][...] for name in about["streams"]}
    blocks = {name: ours[f"blocks/{name}"][...] for name in about["streams"]}
    digests = {name: ours[f"digests/{name}"][...] for name in about["streams"]}
    tags = Strings(ours["tags/values"][...], ours["tags/starts"][...])
    columns = {name: column[...] for name, column in ours["columns"].items()}
    arrays = index_arrays([(starts[name], blocks[name], digests[name]) for name in about["streams"]], tags, columns)
    if index_digest(written, arrays) != ours.attrs["digest"]:
        raise PackedUnreadable(path, "is damaged: its index is not the one that was written")
    streams = {}
    for name, each in about["streams"].items():
        dataset = file[each["dataset"]]
        streams[name] = StreamPlace(
            each["dataset"],
            dataset.dtype,
            tuple(each["shape"]),
            starts[name],
            offset_of(dataset),
            each["kind"],
            each["is_single"],
            blocks[name],
            digests[name],
        )
    found = PackedFile(path, stamp, about["layout"], streams, tags, columns, about, _read_extras(path, ours))
    check_places(found)
    return found


def _read_extras(path: Path, ours: Any) -> Strings | None:
    if "extra" not in ours:
        return None
    found = Strings(ours["extra/values"][...], ours["extra/starts"][...])
    # With a digest of its own: files are read by versions that know nothing of it.
    if index_digest("", [found.packed, found.lengths]) != ours["extra"].attrs["digest"]:
        raise PackedUnreadable(path, "is damaged: its index is not the one that was written")
    return found


def check_places(found: PackedFile) -> None:
    """Rows must lie in their data sets, and data sets in the file: what is mapped is not looked at again."""
    for name, place in found.streams.items():
        if len(place.starts) != len(found) + 1 or np.any(np.diff(place.starts) < 0):
            raise PackedUnreadable(found.path, f"is damaged: stream {name!r} does not have {len(found):,} rows")
        if place.offset is not None and place.offset + place.nbytes > found.stamp[0]:
            missing = place.offset + place.nbytes - found.stamp[0]
            raise PackedUnreadable(found.path, f"is truncated: {missing:,} bytes of stream {name!r} are missing")


def _refuse_other_things(path: Path) -> None:
    try:
        if path.is_dir():
            raise PackedUnreadable(path, "is a folder", "name a file in it")
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
    except FileNotFoundError:
        others = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = [near(path.with_name(name)) for name in difflib.get_close_matches(path.name, others, n=1)]
        hint = f"did you mean {meant[0]}?" if meant else "`paceline pack IN... OUT.h5` makes packed files"
        raise PackedUnreadable(path, "there is no such file", hint) from None
    except OSError as error:
        raise PackedUnreadable(path, f"cannot be read: {error.strerror}", "") from None
    if begin != _MAGIC:
        what = "is empty" if not begin else "is not HDF5"
        hint = "`paceline pack IN... OUT.h5` makes packed files; a manifest's name ends in .json"
        raise PackedUnreadable(path, what, hint)


def _why(what: str) -> str:
    if "truncated" in what:
        return "is truncated: its end is missing"
    return f"is damaged, or no packed data: {what}"
